"""What a job exchanges of its buckets: gradients in each step, parameters now and then.

Parameters travel only with a lossy way back (docs/design/0033).
"""

from collections.abc import Sequence

import torch

from tailbound.compute.budget import Budget
from tailbound.compute.compensation import normalize_factor
from tailbound.protocol.events import Reduced
from tailbound.training.accumulate import Work
from tailbound.training.buckets import FlatBucket
from tailbound.training.exchange import Exchange


def reduce_gradients(
    exchange: Exchange,
    buckets: Sequence[FlatBucket],
    work: Work,
    optimizer: torch.optim.Optimizer,
    loss_scale: float,
) -> list[Reduced]:
    """Replace the accumulated gradients, in the buckets, by their means.

    Args:
        exchange: the job's.
        buckets: all of its gradients.
        work: what is behind them.
        optimizer: its learning rate, if it has one, is for the detector's rule.
        loss_scale: factor that they carry.

    Returns:
        What became of each bucket.
    """
    learning_rate = optimizer.param_groups[0].get("lr")
    if learning_rate is not None:
        learning_rate = float(learning_rate)
    reduced = []
    for bucket in buckets:
        bucket.pull()
        reduced.append(
            exchange.all_reduce(
                bucket.flat,
                bucket.values_N,
                work.weight,
                learning_rate=learning_rate,
                loss_scale=loss_scale,
                computed=work.computed,
                planned=work.planned,
                is_last=bucket is buckets[-1],
            )
        )
    return reduced


def push_gradients(
    buckets: Sequence[FlatBucket], reduced: Reduced, budget: Budget | None
) -> None:
    """Copy the means back into the gradients, normalised as the compute bound says."""
    factor = 1.0
    if budget is not None:
        factor = normalize_factor(
            budget.bound.normalize,
            reduced.total_computed,
            reduced.total_planned,
            budget.mean_dropped_share,
        )
    for bucket in buckets:
        if factor != 1.0:
            bucket.flat.mul_(factor)
        bucket.push()


def resync_parameters(exchange: Exchange, buckets: Sequence[FlatBucket]) -> float:
    """Make the parameters of all ranks equal; see ``Job.resync``.

    Returns:
        How far this rank was from the others; 0 where replicas cannot differ.
    """
    if not exchange.resync_every:
        return 0.0
    for bucket in buckets:
        bucket.pull_parameters()
    drift = exchange.resync([bucket.flat for bucket in buckets])
    for bucket in buckets:
        bucket.push_parameters()
    return drift

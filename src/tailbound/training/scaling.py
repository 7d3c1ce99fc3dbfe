"""A GradScaler over gradients that ranks share: one decision for all of them.

The scaler looks at means, which are equal on all ranks whatever was lost on the way in,
so all find the same. With a way back that may lose they are not equal, and ranks ask
each other first.
"""

import math
from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler

from tailbound.errors import ConfigError
from tailbound.training.buckets import FlatBucket
from tailbound.training.exchange import Exchange


def scale_of(scaler: GradScaler | None, loss_scale: float) -> float:
    """Factor that the gradients carry.

    Raises:
        ConfigError: both say one.
    """
    if scaler is None:
        return loss_scale
    if loss_scale != 1.0:
        raise ConfigError(
            f"step() got scaler and loss_scale={loss_scale}; give one: the scaler "
            "knows its scale"
        )
    return float(scaler.get_scale())


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    exchange: Exchange,
    buckets: Sequence[FlatBucket],
) -> bool:
    """Step the optimizer, through the scaler if there is one.

    Args:
        optimizer: its gradients are the means.
        scaler: unscales them, or leaves the step out if one is not finite; then its
            scale shrinks, on all ranks alike.
        exchange: the job's.
        buckets: that the means came in, pushed into the gradients.

    Returns:
        True if the step was left out.
    """
    if scaler is None:
        optimizer.step()
        return False
    if exchange.resync_every:
        _share_overflow(exchange, buckets)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return bool(scaler.get_scale() < before)


def _share_overflow(exchange: Exchange, buckets: Sequence[FlatBucket]) -> None:
    """What one rank received that is not finite, all have."""
    has_own = not all(bool(torch.isfinite(bucket.flat).all()) for bucket in buckets)
    if any(part != b"\0" for part in exchange.all_gather(bytes([has_own]))):
        buckets[0].flat[0] = math.inf
        buckets[0].push()

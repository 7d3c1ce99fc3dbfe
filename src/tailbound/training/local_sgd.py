"""Local-SGD under a compute bound: ranks step alone, and average now and then (C8).

A period is ``sync_every`` local steps. The threshold is over their compute time: a rank
that reaches it takes no further local step and joins the average with what it has. What
travels is how far each rank moved, so the average is an optimizer step of rate 1 along
the mean of the moves, and all that holds for gradients (weights, normalisation, skipped
steps, records, replicas equal bit for bit) holds here.
Source: DropCompute, app:local_sgd; Lin et al. 2020 for Local-SGD.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tailbound.config import ComputeBound, LossBound, Transport, require
from tailbound.records import StepReport
from tailbound.training.attaching import attach
from tailbound.training.job import Job, OnRecord


class LocalSGD:
    """Trains one rank locally and averages parameters every ``sync_every`` steps.

    Each rank keeps its own optimizer state. Buffers stay local, but for those of a DDP
    module that broadcasts them.

    Args:
        model: the same on every rank; plain, or wrapped in DDP.
        optimizer: of the model's parameters; steps locally.
        sync_every: local steps of a period (H).
        compute: bound on a period's compute; None: every rank takes all local steps.
            With ``normalize="computed"`` ranks count by the local steps they took, with
            ``"planned"`` a rank that took fewer moved less (the paper's plain average).
        network: None averages over the process group; ``LossBound.fixed(0.0)`` over
            tailbound's transport. Parameters are averaged exactly: no other bound.
        transport: how bytes travel with a loss bound.
        on_record: called with every record; a StepReport is a period.
        run: label written into the records.

    Raises:
        ConfigError: a setting, the model or the environment is unusable.
        TailboundError: the ranks could not meet or do not agree.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        compute: ComputeBound | None = None,
        network: LossBound | None = None,
        transport: Transport | None = None,
        on_record: OnRecord | None = None,
        run: str = "",
    ) -> None:
        require(
            isinstance(sync_every, int) and sync_every >= 1,
            f"sync_every is 1 or more local steps, not {sync_every}",
        )
        require(
            network is None or network.p_high == 0.0,
            "Local-SGD averages parameters exactly: network is None or "
            "LossBound.fixed(0.0)",
        )
        require(
            compute is None or compute.preempt == "micro_batch",
            "a local step is whole or not taken: leave preempt='micro_batch'",
        )
        self._optimizer = optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._job: Job = attach(
            model,
            torch.optim.SGD(self._parameters, lr=1.0),
            micro_batches=sync_every,
            compute=compute,
            network=network,
            transport=transport,
            on_record=on_record,
            run=run,
        )
        self._start = [p.detach().clone() for p in self._parameters]
        self._steps = 0

    @property
    def job(self) -> Job:
        """The job behind it: rank, threshold, ``check_replicas``, ``review``."""
        return self._job

    def local_steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give the batches of one period, until the threshold is reached.

        Args:
            batches: what the loader gives; an iterator keeps what is not taken.
        """
        return self._job.micro_batches(iter(batches))

    def step(self, loss: Tensor) -> None:
        """Take one local step along the loss's gradient."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def average(self) -> StepReport:
        """End the period: all ranks take the average of their parameters.

        Returns:
            What the period cost and lost; its weight is this rank's local steps.

        Raises:
            TailboundError: the exchange failed; the job is over.
        """
        steps, self._steps = self._steps, 0
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._start, strict=True):
                if steps:
                    parameter.grad = (start - parameter).mul_(steps)
                parameter.copy_(start)
        self._job.declare(float(steps))
        report = self._job.step()
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._start, strict=True):
                start.copy_(parameter)
        return report

    def close(self) -> None:
        """Leave the job in good order. Closing twice is fine."""
        self._job.close()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._job.__exit__(kind, error, trace)

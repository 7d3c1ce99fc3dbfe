"""The job object: micro-batches in, one bounded all-reduce and optimizer step out."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError, TailboundError
from tailbound.protocol.events import Reduced
from tailbound.protocol.wire import BucketSpec
from tailbound.records import Record, RoundReport, StepReport
from tailbound.training.batches import split_batch
from tailbound.training.buckets import (
    FlatBucket,
    equalise,
    make_buckets,
    parameter_digest,
)
from tailbound.training.exchange import (
    Exchange,
    GroupExchange,
    LocalExchange,
    ProcessGroupExchange,
)
from tailbound.training.leaving import describe, note_closed, note_open
from tailbound.training.rendezvous import find_place, find_server
from tailbound.transport.group import Group

_log = logging.getLogger("tailbound")

OnRecord = Callable[[Record], None]
MakeExchange = Callable[[tuple[BucketSpec, ...]], Exchange]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    compute: None = None,
    network: LossBound | None = LossBound(),  # noqa: B008 - frozen
    transport: Transport | None = None,
    on_record: OnRecord | None = None,
    run: str = "",
) -> "Job":
    """Attach a job to a model and its optimizer.

    Meets the other ranks (``torchrun`` started them, or a process group exists), makes
    parameters and buffers equal to rank 0's, and returns the job object.

    Args:
        model: the same on every rank; a plain module, not wrapped in DDP.
        optimizer: of the model's parameters.
        micro_batches: how many each step's batch is split into.
        compute: the compute bound; None, the only value so far, switches it off.
        network: the loss bound; None averages exactly over the process group, whose
            own timeout holds then.
        transport: how bytes travel; only with a loss bound.
        on_record: called with every RoundReport and StepReport as it is made.
        run: label written into the records.

    Returns:
        The job; close it, or use it as a context manager. One that is still open when
        the script ends is closed then.

    Raises:
        ConfigError: a setting, the model or the environment is unusable.
        TailboundError: the ranks could not meet or do not agree; see ``errors``.
    """
    if compute is not None:
        raise ConfigError(
            "a compute bound is not part of this version; leave compute=None"
        )

    def make_exchange(specs: tuple[BucketSpec, ...]) -> Exchange:
        return _find_exchange(specs, network, transport or Transport())

    return attach_through(
        make_exchange,
        model,
        optimizer,
        micro_batches=micro_batches,
        on_record=on_record,
        run=run,
    )


def attach_through(
    make_exchange: MakeExchange,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    micro_batches: int = 1,
    on_record: OnRecord | None = None,
    run: str = "",
) -> "Job":
    """Do what ``attach`` does, over an exchange that the caller brings.

    Args:
        make_exchange: given the buckets, meets the other ranks.
        model: see ``attach``.
        optimizer: see ``attach``.
        micro_batches: see ``attach``.
        on_record: see ``attach``.
        run: see ``attach``.

    Raises:
        ConfigError: see ``attach``.
        TailboundError: see ``attach``.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches is 1 or more, not {micro_batches}")
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is wrapped in DDP, which reduces gradients itself; attach "
                "the plain module (ddp.module)"
            )
    _check_optimizer(model, optimizer)
    buckets = make_buckets(model)
    exchange = make_exchange(tuple(bucket.spec for bucket in buckets))
    try:
        if exchange.world_size > 1:
            equalise(model, exchange.all_gather, exchange.rank)
    except BaseException as error:
        exchange.abort(describe(error))
        raise
    return Job(model, optimizer, exchange, buckets, micro_batches, on_record, run)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ours = {id(parameter) for parameter in model.parameters()}
    steps = (p for group in optimizer.param_groups for p in group["params"])
    if any(id(parameter) not in ours for parameter in steps):
        raise ConfigError(
            "the optimizer steps parameters that are not the model's: nobody would "
            "average their gradients; attach the module that holds them all"
        )


def _find_exchange(
    specs: tuple[BucketSpec, ...], network: LossBound | None, transport: Transport
) -> Exchange:
    place = find_place(has_server=transport.server is not None)
    if place.world_size == 1:
        return LocalExchange()
    if network is None:
        if not dist.is_initialized():
            raise ConfigError(
                "network=None averages over the process group: call "
                "torch.distributed.init_process_group first"
            )
        return ProcessGroupExchange()
    address, server = find_server(place, transport)
    group = Group(
        address,
        rank=place.rank,
        world_size=place.world_size,
        buckets=specs,
        bound=network,
        transport=transport,
        server=server,
    )
    return GroupExchange(group)


class Job:
    """One rank of a training job. Made by ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        buckets: list[FlatBucket],
        micro_batches: int,
        on_record: OnRecord | None,
        run: str,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._exchange, self._buckets = exchange, buckets
        self._micro_batches = micro_batches
        self._on_record, self._run = on_record, run
        self._weight = 0.0
        self._step = 0
        self._loss_sum: Tensor | None = None
        self._told_skip = False
        self._closed = False
        note_open(exchange)
        self._ended_s = time.perf_counter()
        self.rounds: tuple[RoundReport, ...] = ()
        """The rounds of the last step: way in and way back of each bucket."""

    @property
    def rank(self) -> int:
        """This process, 0 to world_size - 1."""
        return self._exchange.rank

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self._exchange.world_size

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Split a batch along its first axis into the planned micro-batches.

        Args:
            batch: a tensor, or a tuple, list or dict of tensors of equal length. A
                batch of fewer samples than micro-batches gives one a sample.

        Raises:
            ConfigError: something else, or lengths differ.
        """
        return split_batch(batch, self._micro_batches)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Accumulate the gradient of one micro-batch.

        Args:
            loss: scalar, the mean over what ``weight`` counts.
            weight: samples or tokens behind the loss, >= 0; 1 for equal micro-batches.
                The step's gradient is the weighted mean over all ranks. The gradient
                is multiplied by it, so keep it near 1 where gradients are float16.

        Raises:
            ConfigError: the weight is negative or not finite.
            JobClosedError: the job is closed.
        """
        self._require_open()
        if not 0.0 <= weight < float("inf"):
            raise ConfigError(f"a weight is finite and >= 0, not {weight}")
        if weight == 0.0:
            return
        torch.autograd.backward(loss if weight == 1.0 else loss * weight)
        self._weight += weight
        # Stays on its device until the step: asking for its value would wait for it.
        told = loss.detach().float() * weight
        self._loss_sum = told if self._loss_sum is None else self._loss_sum + told

    def step(self, *, loss_scale: float = 1.0) -> StepReport:
        """Exchange the accumulated gradients, step the optimizer, clear them.

        With nothing accumulated this rank joins with weight 0; if no rank has
        anything, no optimizer steps.

        Args:
            loss_scale: factor that the loss was multiplied by; for the detector.

        Returns:
            What this step cost and lost.

        Raises:
            TailboundError: the exchange failed; the job is over.
        """
        self._require_open()
        begun_s = time.perf_counter()
        compute_s = begun_s - self._ended_s
        learning_rate = self._optimizer.param_groups[0].get("lr")
        if learning_rate is not None:
            learning_rate = float(learning_rate)
        self._step += 1
        reduced: list[Reduced] = []
        for bucket in self._buckets:
            bucket.pull()
            reduced.append(
                self._exchange.all_reduce(
                    bucket.flat,
                    bucket.values_N,
                    self._weight,
                    learning_rate=learning_rate,
                    loss_scale=loss_scale,
                )
            )
        exchange_s = time.perf_counter() - begun_s
        skipped = reduced[0].total_weight == 0
        if not skipped:
            for bucket in self._buckets:
                bucket.push()
            self._optimizer.step()
        elif self.rank == 0 and not self._told_skip:
            self._told_skip = True
            _log.warning(
                "step %d skipped: no rank had a micro-batch; later ones are skipped "
                "without a warning, see StepReport.skipped",
                self._step,
            )
        self._optimizer.zero_grad()
        report = self._report(reduced, skipped, compute_s, exchange_s)
        self._weight, self._loss_sum = 0.0, None
        if self._on_record is not None:
            for round_report in self.rounds:
                self._on_record(round_report)
            self._on_record(report)
        self._ended_s = time.perf_counter()
        return report

    def check_replicas(self) -> str:
        """Compare the parameters of all ranks, bit for bit.

        Returns:
            The digest that all ranks share.

        Raises:
            TailboundError: replicas differ; names the ranks and their digests.
        """
        self._require_open()
        digest = parameter_digest(self._model)
        digests = [part.decode() for part in self._exchange.all_gather(digest.encode())]
        if len(set(digests)) > 1:
            shown = ", ".join(f"rank {r}: {d}" for r, d in enumerate(digests))
            raise TailboundError(
                f"replicas differ after step {self._step} ({shown}); does something "
                "other than job.step() change parameters?"
            )
        self._ended_s = time.perf_counter()
        return digest

    def close(self) -> None:
        """Leave the job in good order. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            note_closed(self._exchange)
            self._exchange.close()

    def abort(self, reason: str) -> None:
        """Leave because of an error; the other ranks are told the reason."""
        if not self._closed:
            self._closed = True
            note_closed(self._exchange)
            self._exchange.abort(reason)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(describe(error))

    def _require_open(self) -> None:
        if self._closed:
            raise JobClosedError("the job is closed; attach again to go on")

    def _report(
        self,
        reduced: list[Reduced],
        skipped: bool,
        compute_s: float,
        exchange_s: float,
    ) -> StepReport:
        rounds: list[RoundReport] = [
            msgspec.structs.replace(report, run=self._run, step=self._step)
            for event in reduced
            for report in event.reports
        ]
        self.rounds = tuple(rounds)
        ways_in = [report for report in rounds if report.direction == "in"]
        num_chunks = sum(report.num_chunks for report in ways_in)
        missing = sum(report.missing for report in ways_in)
        # With several buckets: the norm of all of them, the strictest bound, and the
        # verdict on the largest change.
        told = max(reduced, key=lambda event: event.ratio or 0.0)
        strictest = min(reduced, key=lambda event: event.p)
        return StepReport(
            run=self._run,
            rank=self.rank,
            step=self._step,
            weight=self._weight,
            total_weight=told.total_weight,
            skipped=skipped,
            compute_s=compute_s,
            exchange_s=exchange_s,
            p=strictest.p,
            critical=strictest.critical,
            norm=math.hypot(*(event.norm for event in reduced)),
            ratio=told.ratio,
            verdict=told.verdict,
            missing_share=missing / num_chunks if num_chunks else 0.0,
            loss=self._mean_loss(),
        )

    def _mean_loss(self) -> float | None:
        if self._loss_sum is None:
            return None
        mean = float(self._loss_sum) / self._weight
        return mean if math.isfinite(mean) else None

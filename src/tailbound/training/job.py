"""The job object: micro-batches in, one bounded all-reduce and optimizer step out."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from tailbound.compute.budget import Budget, StepSample
from tailbound.compute.compensation import extra_steps
from tailbound.errors import JobClosedError
from tailbound.protocol.events import Reduced
from tailbound.records import Record, RoundReport, StepReport, ThresholdReport
from tailbound.training.accumulate import Accumulation, Work, check_weight
from tailbound.training.batches import split_batch
from tailbound.training.buckets import FlatBucket, compare_digests, parameter_digest
from tailbound.training.ddp import HeldDdp
from tailbound.training.epochs import Epochs
from tailbound.training.exchange import Exchange
from tailbound.training.job_state import resume_from, take_state
from tailbound.training.leaving import describe, note_closed, note_open
from tailbound.training.reducing import (
    push_gradients,
    reduce_gradients,
    resync_parameters,
)
from tailbound.training.scaling import scale_of, step_optimizer
from tailbound.training.step_records import describe_step, label_rounds

_log = logging.getLogger("tailbound")

OnRecord = Callable[[Record], None]
SKIPPED = "step %d skipped: no rank had a micro-batch; said once (StepReport.skipped)"


class Job:
    """One rank of a training job. Made by ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        buckets: list[FlatBucket],
        accumulation: Accumulation,
        *,
        micro_batches: int,
        budget: Budget | None,
        held: HeldDdp | None,
        on_record: OnRecord | None,
        run: str,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._exchange, self._buckets = exchange, buckets
        self._accumulation, self._micro_batches = accumulation, micro_batches
        self._budget, self._held = budget, held
        self._on_record, self._run = on_record, run
        self._step = 0
        self._epochs = Epochs()
        self._told_skip = False
        self._closed = False
        note_open(exchange)
        self._ended_s = time.perf_counter()
        self.rounds: tuple[RoundReport, ...] = ()
        """The rounds of the last step: way in and way back of each bucket."""
        self.threshold_report: ThresholdReport | None = None
        """The newest decision of the compute bound, if there is one."""

    @property
    def rank(self) -> int:
        """This process, 0 to world_size - 1."""
        return self._exchange.rank

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self._exchange.world_size

    @property
    def num_steps(self) -> int:
        """Steps done, those before a restart included."""
        return self._step

    @property
    def threshold_s(self) -> float | None:
        """Seconds of compute after which the next step is cut; None: it is not."""
        return None if self._budget is None else self._budget.threshold_s

    @property
    def planned_micro_batches(self) -> int:
        """Micro-batches of the next step; grows with ``compensate="batch"``."""
        budget = self._budget
        return self._micro_batches if budget is None else budget.num_micro_batches

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Give the step's micro-batches until the threshold is reached.

        Args:
            batch: a tensor, or a tuple, list or dict of tensors of equal length, to be
                split along its first axis; fewer samples than micro-batches give one a
                sample. Or an iterator of micro-batches: the planned number is taken
                from it, and what is not computed stays in it.

        Raises:
            ConfigError: something else, or lengths differ.
            JobClosedError: the job is closed.
        """
        self._require_open()
        planned = self.planned_micro_batches
        if isinstance(batch, Iterator):
            return self._accumulation.run(batch, planned)
        parts = split_batch(batch, planned)
        self._epochs.note_parts(parts)
        return self._accumulation.run(parts, len(parts))

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Give a loader's batches; dropped samples again if they are resampled.

        That is with ``compensate="resample"``: they come back before the epoch ends.

        After ``load_state_dict`` the epoch that was under way goes on where it was.

        Args:
            loader: its sampler is a ``tailbound.ResamplingSampler``.

        Raises:
            ConfigError: it has another sampler.
        """
        budget = self._budget
        resamples = budget is not None and budget.bound.compensate == "resample"
        return self._epochs.begin(
            loader, self._exchange.all_gather, resamples=resamples
        )

    def extra_steps(self, steps: int) -> int:
        """Steps to add to a planned number, to make up for what was dropped so far.

        Args:
            steps: that training without drops would take.

        Source: DropCompute, section:dropped_samples_compensation; spec C6.
        """
        dropped = 0.0 if self._budget is None else self._budget.mean_dropped_share
        return extra_steps(steps, dropped)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Accumulate the gradient of one micro-batch.

        With ``preempt="backward"`` it returns early when the threshold is reached.

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
        check_weight(weight)
        self._accumulation.backward(loss, weight)

    def declare(self, weight: float) -> None:
        """Count gradients that the caller put into ``.grad`` without ``backward``.

        Args:
            weight: what is behind them; they are multiplied by it already.

        Raises:
            ConfigError: the weight is negative or not finite.
        """
        check_weight(weight)
        self._accumulation.declare(weight)

    def step(
        self, *, loss_scale: float = 1.0, scaler: GradScaler | None = None
    ) -> StepReport:
        """Exchange the accumulated gradients, step the optimizer, clear them.

        With nothing accumulated this rank joins with weight 0; if none has, no
        optimizer steps.

        Args:
            loss_scale: factor that the loss was multiplied by; for the detector.
            scaler: instead of that: it unscales, steps and updates, on all ranks alike.

        Returns:
            What this step cost and lost.

        Raises:
            ConfigError: both a scaler and a loss_scale.
            TailboundError: the exchange failed; the job is over.
        """
        self._require_open()
        loss_scale = scale_of(scaler, loss_scale)
        threshold_s = self.threshold_s
        work = self._accumulation.finish()
        begun_s = time.perf_counter()
        compute_s = begun_s - self._ended_s
        self._step += 1
        reduced = reduce_gradients(
            self._exchange, self._buckets, work, self._optimizer, loss_scale
        )
        if self._held is not None:
            self._held.share_buffers(self._exchange.all_gather, self.rank)
        exchange_s = time.perf_counter() - begun_s
        left_out = False
        if reduced[0].total_weight:
            buckets = self._buckets
            push_gradients(buckets, reduced[0], self._budget)
            left_out = step_optimizer(self._optimizer, scaler, self._exchange, buckets)
        elif self.rank == 0 and not self._told_skip:
            self._told_skip = True
            _log.warning(SKIPPED, self._step)
        self._optimizer.zero_grad()
        is_due = self._exchange.is_resync_due(self._step)
        drift = resync_parameters(self._exchange, self._buckets) if is_due else None
        self.rounds = label_rounds(reduced, run=self._run, step=self._step)
        report = describe_step(
            reduced,
            self.rounds,
            work,
            run=self._run,
            rank=self.rank,
            step=self._step,
            compute_s=compute_s,
            exchange_s=exchange_s,
            threshold_s=threshold_s,
            drift=drift,
            loss_scale=loss_scale,
            left_out=left_out,
        )
        self._epochs.end_step(int(work.computed))
        self._accumulation.clear()
        step_s = time.perf_counter() - self._ended_s
        self._note(*self.rounds, report)
        self._bound_next(reduced[0], work, exchange_s, step_s)
        self._ended_s = time.perf_counter()
        return report

    def review(self) -> ThresholdReport | None:
        """Look at the compute bound now, and choose its threshold anew.

        All ranks call this after the same step, such as the last one.

        Returns:
            What was decided and what the choice before it brought; None if there is no
            compute bound, or no step since the last look.

        Raises:
            TailboundError: the exchange failed; the job is over.
        """
        self._require_open()
        if self._budget is not None and self._budget.has_news:
            self._decide(self._budget)
            self._ended_s = time.perf_counter()
            return self.threshold_report
        return None

    def resync(self) -> float:
        """Make the parameters of all ranks equal; all ranks call it together.

        With ``LossBound(p_back=...)`` replicas differ a little between steps. This
        happens every ``resync_every`` steps and in ``state_dict``; call it before you
        evaluate or save a model.

        Returns:
            How far this rank was from the others: the L2 norm of the difference over
            that of the parameters; 0 without ``p_back``, where replicas never differ.

        Raises:
            TailboundError: the exchange failed; the job is over.
        """
        self._require_open()
        drift = resync_parameters(self._exchange, self._buckets)
        self._ended_s = time.perf_counter()
        return drift

    def state_dict(self) -> dict[str, Any]:
        """What the bounds have learned, for a checkpoint; all ranks call it together.

        With ``p_back`` the parameters are made equal first: save the model after it.

        Steps done, the regime (in the server plan the server has it, and it is left
        out), the compute bound's threshold and samples, and the place of the sampler
        that ``epoch`` was given. Model and optimizer are yours to save.

        Returns:
            Dicts, lists, strings and numbers, the same on every rank.

        Raises:
            TailboundError: the exchange failed; the job is over.
        """
        self.resync()
        state = take_state(self._exchange, self._budget, self._epochs, self._step)
        self._ended_s = time.perf_counter()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before the first step; all ranks call it together.

        With another number of ranks what single ranks measured is left out, and the
        rest of the sampler's epoch is shared out anew. In the server plan the regime
        starts critical.

        Args:
            state: what ``state_dict`` gave, the same on every rank.

        Raises:
            ConfigError: it is no such state.
            HandshakeError: another rank loaded another one.
            TailboundError: the exchange failed; the job is over.
        """
        self._require_open()
        self._step = resume_from(state, self._exchange, self._budget, self._epochs)
        self._ended_s = time.perf_counter()

    def _bound_next(
        self, reduced: Reduced, work: Work, exchange_s: float, step_s: float
    ) -> None:
        if self._budget is not None and self._budget.end_step(
            StepSample(
                latency_s=work.latency_s,
                exchange_s=exchange_s,
                step_s=step_s,
                planned=work.planned,
                computed=work.computed,
                total_planned=reduced.total_planned,
                total_computed=reduced.total_computed,
            )
        ):
            self._decide(self._budget)

    def _decide(self, budget: Budget) -> None:
        report = budget.decide(self._exchange.all_gather(budget.pack()))
        self.threshold_report = msgspec.structs.replace(report, run=self._run)
        self._note(self.threshold_report)

    def _note(self, *records: Record) -> None:
        if self._on_record is not None:
            for record in records:
                self._on_record(record)

    def check_replicas(self) -> str:
        """Compare the parameters of all ranks, bit for bit.

        Returns:
            The digest that all ranks share.

        Raises:
            TailboundError: replicas differ; names the ranks and their digests.
        """
        self._require_open()
        digest = parameter_digest(self._model)
        compare_digests(self._exchange.all_gather(digest.encode()), self._step)
        self._ended_s = time.perf_counter()
        return digest

    def close(self) -> None:
        """Leave the job in good order. Closing twice is fine."""
        if self._leave():
            self._exchange.close()

    def abort(self, reason: str) -> None:
        """Leave because of an error; the other ranks are told the reason."""
        if self._leave():
            self._exchange.abort(reason)

    def _leave(self) -> bool:
        """Let go of everything but the exchange; False if that was done before."""
        if self._closed:
            return False
        self._closed = True
        note_closed(self._exchange)
        self._accumulation.close()
        if self._held is not None:
            self._held.release()
        return True

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

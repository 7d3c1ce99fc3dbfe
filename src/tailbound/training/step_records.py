"""What a step leaves in the records: its rounds and its report."""

import math
from collections.abc import Sequence

import msgspec

from tailbound.protocol.events import Reduced
from tailbound.records import RoundReport, StepReport
from tailbound.training.accumulate import Work


def label_rounds(
    reduced: Sequence[Reduced], *, run: str, step: int
) -> tuple[RoundReport, ...]:
    """The rounds of all buckets, with the run and the step that they belong to."""
    return tuple(
        msgspec.structs.replace(report, run=run, step=step)
        for event in reduced
        for report in event.reports
    )


def describe_step(
    reduced: Sequence[Reduced],
    rounds: Sequence[RoundReport],
    work: Work,
    *,
    run: str,
    rank: int,
    step: int,
    compute_s: float,
    exchange_s: float,
    threshold_s: float | None,
    drift: float | None = None,
    loss_scale: float = 1.0,
    left_out: bool = False,
) -> StepReport:
    """One step as one rank saw it.

    Args:
        reduced: one for each bucket.
        rounds: of all buckets.
        work: what this rank did.
        run: label of the run.
        rank: this process.
        step: from 1.
        compute_s: from the end of the last step to the start of the exchange.
        exchange_s: the exchange, waiting for slower ranks included.
        threshold_s: that held in this step, if one did.
        drift: between the replicas, if they were made equal after it.
        loss_scale: factor that losses and gradients carry.
        left_out: a scaler found that a gradient is not finite.
    """
    ways_in = [report for report in rounds if report.direction == "in"]
    num_chunks = sum(report.num_chunks for report in ways_in)
    missing = sum(report.missing for report in ways_in)
    # With several buckets: the norm of all of them, the strictest bound, and the
    # verdict on the largest change.
    # In a mesh the last bucket carries the verdict on the step, so it wins a draw.
    told = max(reversed(reduced), key=lambda event: event.ratio or 0.0)
    strictest = min(reduced, key=lambda event: event.p)
    norm = math.hypot(*(event.norm for event in reduced))
    return StepReport(
        run=run,
        rank=rank,
        step=step,
        weight=work.weight,
        total_weight=told.total_weight,
        skipped=told.total_weight == 0,
        compute_s=compute_s,
        exchange_s=exchange_s,
        p=strictest.p,
        critical=strictest.critical,
        norm=norm,
        ratio=told.ratio,
        verdict=told.verdict,
        missing_share=missing / num_chunks if num_chunks else 0.0,
        loss=None if work.loss is None else work.loss / loss_scale,
        planned=work.planned,
        computed=work.computed,
        total_planned=told.total_planned,
        total_computed=told.total_computed,
        threshold_s=threshold_s,
        overshoot_s=work.overshoot_s,
        partial_share=work.partial_share,
        latency_s=work.latency_s,
        drift=drift,
        loss_scale=loss_scale,
        non_finite=left_out or not math.isfinite(norm),
    )

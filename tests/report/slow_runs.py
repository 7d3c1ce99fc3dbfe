"""Records of four small runs with slow workers, by hand: two ranks, six steps."""

from typing import Any

from report.synthetic import make_settings
from tailbound.records import EpochReport, Record, StepReport, ThresholdReport
from tailbound.report.outcome import RunSettings, Stragglers

STEPS = 6
BOUNDED_FROM = 3
COMPUTE_S = {"neither": 0.2, "compute": 0.15, "network": 0.2, "both": 0.15}
EXCHANGE_S = {"neither": 0.05, "compute": 0.05, "network": 0.02, "both": 0.02}
METRIC = {"neither": 0.98, "compute": 0.97, "network": 0.98, "both": 0.975}


def slow_settings(**changes: Any) -> RunSettings:
    """Settings of a run with slow workers."""
    slow = Stragglers(
        micro_batches=4, micro_batch_s=0.05, max_drop=0.1, preempt="backward"
    )
    return make_settings(workers=2, epochs=1, stragglers=slow, **changes)


def slow_records() -> list[Record]:
    """All four runs.

    Rank 0 waits for rank 1 in the odd steps. From step 3 on the bounded runs drop one
    of eight micro-batches, on rank 1.
    """
    return [record for run in COMPUTE_S for record in one_run(run)]


def one_run(run: str) -> list[Record]:
    """One run."""
    records: list[Record] = []
    is_bounded = run in ("compute", "both")
    for step in range(1, STEPS + 1):
        cut = is_bounded and step >= BOUNDED_FROM
        slow_s = 0.0 if cut else 0.1 * (step % 2)
        records += [one_step(run, rank, step, cut, slow_s) for rank in (0, 1)]
    if is_bounded:
        records += [look(run, 2, None), look(run, STEPS, 0.2)]
    records += [
        EpochReport(
            run=run,
            rank=rank,
            epoch=1,
            step=STEPS,
            metric=METRIC[run],
            metric_name="accuracy",
            train_s=1.5 if run == "neither" else 1.2,
            digest=run,
        )
        for rank in (0, 1)
    ]
    return records


def one_step(run: str, rank: int, step: int, cut: bool, slow_s: float) -> StepReport:
    """One rank's step."""
    return StepReport(
        run=run,
        rank=rank,
        step=step,
        weight=4.0,
        total_weight=8.0,
        skipped=False,
        compute_s=COMPUTE_S[run] + slow_s * rank,
        exchange_s=EXCHANGE_S[run] + slow_s * (1 - rank),
        p=0.0,
        critical=False,
        norm=1.0,
        ratio=None,
        verdict="",
        missing_share=0.0,
        loss=1.0 / step,
        planned=4,
        computed=3.0 if cut and rank == 1 else 4.0,
        total_planned=8,
        total_computed=7.0 if cut else 8.0,
        threshold_s=0.16 if cut else None,
        overshoot_s=0.01 if cut and rank == 1 else None,
        latency_s=(0.05,) * 4,
    )


def look(run: str, step: int, realised_step_s: float | None) -> ThresholdReport:
    """A decision of the compute bound."""
    return ThresholdReport(
        run=run,
        rank=0,
        step=step,
        threshold_s=0.16,
        predicted_step_s=0.21,
        predicted_speedup=1.1,
        predicted_drop=0.1,
        calibration_step_s=0.3,
        realised_step_s=realised_step_s,
        realised_speedup=None if realised_step_s is None else 1.3,
        dropped_share_W=(0.0, 0.25),
        relative_score_W=(1.0, 0.8),
        individual_score_W=(1.0, 0.9),
        persistent_stragglers=(),
        verdict="a threshold",
        curve_threshold_s_K=(0.1, 0.16, 0.3),
        curve_speedup_K=(0.8, 1.1, 1.0),
        curve_drop_K=(0.5, 0.1, 0.0),
    )

"""The live bound: phases, decisions that are equal on all ranks, and looking again."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tailbound.compute.budget import Budget, Phase, StepSample
from tailbound.config import ComputeBound
from tailbound.errors import ConfigError, PeerProtocolError
from tailbound.records import ThresholdReport

AUTO = ComputeBound(warmup_steps=2, calibration_steps=3, retune_every=4, max_drop=0.25)
NUM = 4


def make(bound: ComputeBound = AUTO, world_size: int = 2) -> list[Budget]:
    return [
        Budget(bound, num_micro_batches=NUM, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def sample(
    latency_s: tuple[float, ...],
    *,
    planned: int = NUM,
    total_planned: int = 2 * NUM,
    total_computed: float | None = None,
) -> StepSample:
    return StepSample(
        latency_s=latency_s,
        exchange_s=0.5,
        step_s=sum(latency_s) + 0.5,
        planned=planned,
        computed=len(latency_s),
        total_planned=total_planned,
        total_computed=total_planned if total_computed is None else total_computed,
    )


def step(
    budgets: list[Budget], *latencies_s: tuple[float, ...]
) -> list[ThresholdReport]:
    """One step on all ranks; what they decided, if they had to."""
    computed = sum(len(latency_s) for latency_s in latencies_s)
    due = [
        budget.end_step(sample(latency_s, total_computed=computed))
        for budget, latency_s in zip(budgets, latencies_s, strict=True)
    ]
    assert len(set(due)) == 1
    if not due[0]:
        return []
    parts = tuple(budget.pack() for budget in budgets)
    return [budget.decide(parts) for budget in budgets]


EVEN = (1.0, 1.0, 1.0, 1.0)
SLOW = (4.0, 1.0, 20.0, 20.0)
CUT = SLOW[:2]


def calibrate(budgets: list[Budget]) -> list[ThresholdReport]:
    """Two steps to warm up, three to measure; the ranks take turns to be slow."""
    phases = []
    for _ in range(2):
        phases.append(budgets[0].phase)
        assert step(budgets, EVEN, EVEN) == []
    phases.append(budgets[0].phase)
    assert phases == [Phase.WARM_UP, Phase.WARM_UP, Phase.CALIBRATION]
    assert step(budgets, SLOW, EVEN) == []
    assert step(budgets, EVEN, SLOW) == []
    return step(budgets, SLOW, EVEN)


def test_a_threshold_follows_warm_up_and_calibration() -> None:
    budgets = make()
    assert not budgets[0].is_over(1e9)

    reports = calibrate(budgets)

    assert budgets[0].phase is Phase.BOUNDED
    # Two of eight, 20 s each, would start at 5 s and later; the others by 4 s.
    assert reports[0].threshold_s == pytest.approx(4.5)
    assert reports[0].predicted_drop == 0.25
    assert reports[0].calibration_step_s == 25.0
    assert reports[0].realised_step_s is None
    assert budgets[0].is_over(4.5)
    assert not budgets[0].is_over(4.4)


def test_all_ranks_decide_alike() -> None:
    first, second = calibrate(make())

    assert first == ThresholdReport(
        **{
            name: getattr(second, name)
            for name in ThresholdReport.__struct_fields__
            if name != "rank"
        },
        rank=0,
    )


def test_a_fixed_threshold_holds_from_the_first_step() -> None:
    (budget,) = make(ComputeBound(threshold_s=2.0), world_size=1)

    assert budget.phase is Phase.BOUNDED
    assert budget.threshold_s == 2.0


def test_it_looks_again_after_so_many_steps_and_tells_what_was_gained() -> None:
    budgets = make()
    calibrate(budgets)
    # Rank 0 is cut in each step.
    for _ in range(3):
        assert step(budgets, CUT, EVEN) == []

    report = step(budgets, CUT, EVEN)[0]

    assert report.dropped_share_W == (0.5, 0.0)
    assert report.realised_step_s == 5.0
    assert report.realised_speedup == 3.75
    assert report.imputed_share == pytest.approx(0.25)
    assert report.relative_score_W == (0.4, 1.0)
    assert report.individual_score_W == (1.0, 1.0)  # both were slower before


def test_dropping_far_too_much_is_looked_at_at_once() -> None:
    budgets = make()
    calibrate(budgets)
    assert step(budgets, (5.0,), (5.0,)) == []
    assert step(budgets, (5.0,), (5.0,)) == []

    assert step(budgets, (5.0,), (5.0,)) != []


def test_short_steps_of_an_epochs_end_do_not_count() -> None:
    (budget,) = make(ComputeBound(warmup_steps=0, calibration_steps=1), world_size=1)
    short = sample((1.0,), planned=1, total_planned=1)

    assert not budget.end_step(short)
    assert not budget.has_news
    assert budget.end_step(sample(EVEN, total_planned=NUM))


def test_a_rank_that_finishes_nothing_lifts_the_threshold_and_is_named() -> None:
    budgets = make()
    calibrate(budgets)
    for _ in range(2):
        step(budgets, (), EVEN)

    report = step(budgets, (), EVEN)[0]

    assert report.threshold_s is None
    assert report.persistent_stragglers == (0,)
    assert report.verdict.startswith("no threshold: rank 0 finished no micro-batch")
    assert budgets[1].threshold_s is None


def test_growing_the_plan_scales_the_threshold_with_it() -> None:
    budgets = make(replace(AUTO, compensate="batch"))

    report = calibrate(budgets)[0]

    assert budgets[0].num_micro_batches == 6  # 4 / 0.75, rounded up
    assert report.threshold_s == pytest.approx(4.5 * 6 / 4)


def test_the_dropped_share_is_over_bounded_steps() -> None:
    budgets = make()
    assert budgets[0].mean_dropped_share == 0.0
    calibrate(budgets)
    step(budgets, CUT, EVEN)
    step(budgets, EVEN, EVEN)

    assert budgets[0].mean_dropped_share == 0.125


def test_latencies_of_another_length_are_refused() -> None:
    first, second = make()
    for budget in (first, second):
        for _ in range(5):
            budget.end_step(sample(EVEN))

    with pytest.raises(PeerProtocolError, match="rank 1 sent 8 bytes of latencies"):
        first.decide((first.pack(), bytes(8)))


def test_choosing_again_and_again_from_cut_steps_keeps_the_threshold() -> None:
    """Latencies of one distribution; what was cut is filled in (docs/design/0021)."""
    bound = ComputeBound(warmup_steps=0, calibration_steps=50, retune_every=50)
    budgets = [
        Budget(bound, num_micro_batches=12, rank=rank, world_size=4)
        for rank in range(4)
    ]
    rng = np.random.default_rng(3)
    thresholds = []
    for _ in range(500):
        rows = []
        for budget in budgets:
            latency_s, spent_s = [], 0.0
            for seconds in 1.0 + rng.exponential(0.5, 12):
                if budget.is_over(spent_s):
                    break
                latency_s.append(float(seconds))
                spent_s += seconds
            rows.append(tuple(latency_s))
        computed = sum(map(len, rows))
        due = [
            budget.end_step(
                replace(
                    sample(row, planned=12, total_planned=48, total_computed=computed)
                )
            )
            for budget, row in zip(budgets, rows, strict=True)
        ]
        if due[0]:
            parts = tuple(budget.pack() for budget in budgets)
            thresholds.append([b.decide(parts).threshold_s for b in budgets].pop())

    assert len(thresholds) == 10
    first = thresholds[0]
    assert first is not None
    assert all(t == pytest.approx(first, rel=0.06) for t in thresholds)


def resumed(
    budget: Budget, bound: ComputeBound = AUTO, *, is_own: bool = True, num: int = NUM
) -> Budget:
    """A new budget that goes on from this one's state, as a file would hold it."""
    fresh = Budget(bound, num_micro_batches=num, rank=0, world_size=2)
    fresh.load_state_dict(json.loads(json.dumps(budget.state_dict())), is_own=is_own)
    return fresh


def test_a_restart_in_the_calibration_changes_no_decision() -> None:
    whole, parts = make(), make()
    told = calibrate(whole)
    for _ in range(2):
        step(parts, EVEN, EVEN)
    step(parts, SLOW, EVEN)

    parts = [resumed(budget) for budget in parts]
    step(parts, EVEN, SLOW)
    again = step(parts, SLOW, EVEN)

    assert again[0].threshold_s == told[0].threshold_s is not None
    assert again[0].step == told[0].step == 5


def test_a_restart_under_a_threshold_keeps_all_that_was_measured() -> None:
    budgets = make()
    calibrate(budgets)
    step(budgets, CUT, EVEN)

    fresh = resumed(budgets[0])

    assert fresh.phase is Phase.BOUNDED
    assert fresh.state_dict() == budgets[0].state_dict()
    assert fresh.mean_dropped_share == budgets[0].mean_dropped_share == 0.25


def test_with_other_ranks_the_threshold_stays_and_samples_go() -> None:
    budgets = make()
    calibrate(budgets)
    step(budgets, CUT, EVEN)

    fresh = resumed(budgets[0], is_own=False)

    assert fresh.threshold_s == budgets[0].threshold_s
    assert fresh.step == 6
    assert fresh.mean_dropped_share == 0.25
    assert not fresh.has_news


def test_with_other_ranks_a_calibration_begins_again_without_a_warm_up() -> None:
    budgets = make()
    for latencies_s in ((EVEN, EVEN), (EVEN, EVEN), (SLOW, EVEN), (EVEN, SLOW)):
        step(budgets, *latencies_s)

    fresh = [resumed(budgets[0], is_own=False) for _ in range(2)]

    assert fresh[0].phase is Phase.CALIBRATION
    assert step(fresh, SLOW, EVEN) == []
    assert step(fresh, EVEN, SLOW) == []
    assert len(step(fresh, SLOW, EVEN)) == 2


def test_what_is_left_of_a_warm_up_is_not_left_out() -> None:
    budgets = make()
    step(budgets, EVEN, EVEN)

    assert resumed(budgets[0], is_own=False).phase is Phase.WARM_UP


@pytest.mark.parametrize("change", ["micro-batches", "from fixed"])
def test_a_threshold_for_other_steps_is_measured_anew(change: str) -> None:
    if change == "micro-batches":
        budgets = make()
        calibrate(budgets)
        fresh = resumed(budgets[0], num=2 * NUM)
    else:
        budgets = make(ComputeBound(threshold_s=2.5))
        step(budgets, CUT, EVEN)
        fresh = resumed(budgets[0])

    assert fresh.threshold_s is None
    assert fresh.phase is not Phase.BOUNDED
    assert fresh.step == budgets[0].step


def test_a_fixed_threshold_is_the_settings_and_not_the_states() -> None:
    budgets = make()
    calibrate(budgets)

    fresh = resumed(budgets[0], ComputeBound(threshold_s=9.0, retune_every=4))

    assert (fresh.threshold_s, fresh.phase) == (9.0, Phase.BOUNDED)
    # The next report comes four steps from here.
    due = [fresh.end_step(sample(EVEN)) for _ in range(4)]
    assert due == [False, False, False, True]


def test_a_grown_plan_comes_back_only_where_it_may_grow() -> None:
    bound = replace(AUTO, compensate="batch")
    budgets = make(bound)
    calibrate(budgets)
    assert budgets[0].num_micro_batches > NUM

    kept, dropped = resumed(budgets[0], bound), resumed(budgets[0], AUTO)

    assert kept.num_micro_batches == budgets[0].num_micro_batches
    assert (dropped.num_micro_batches, dropped.threshold_s) == (NUM, None)


@pytest.mark.parametrize("damage", [{"step": "five"}, {"window": [{}]}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    (budget, _) = make()

    with pytest.raises(ConfigError, match="not the state of a compute bound: "):
        budget.load_state_dict({**budget.state_dict(), **damage}, is_own=True)

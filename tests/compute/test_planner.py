"""Plans: worked values, real traces, estimates, and what is said about them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailbound.compute.planner import plan
from tailbound.compute.plans import Plan
from tailbound.compute.traces import Trace, read_trace
from tailbound.errors import ConfigError

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TINY_S = [[[1.0, 1.0, 1.0], [1.0, 1.0, 4.0]], [[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]]]
"""The specification's worked example, T_c = 1."""

real_traces = pytest.mark.skipif(
    not DATA.is_dir(), reason="the real traces are not here"
)


def trace_of(latency_s_SWM: Any, **fields: Any) -> Trace:
    latency_s_SWM = np.array(latency_s_SWM)
    steps, workers, _ = latency_s_SWM.shape
    defaults: dict[str, Any] = {
        "comm_s_S": None,
        "workers": tuple(f"w{number}" for number in range(workers)),
        "steps": tuple(range(steps)),
    }
    return Trace(latency_s_SWM, **(defaults | fields))


def noisy(
    steps: int, workers: int, micro_batches: int = 4, *, seed: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Independent micro-batches of 0.1 s with a heavy tail."""
    rng = np.random.default_rng(seed)
    return 0.1 + 0.05 * rng.lognormal(0.0, 1.0, (steps, workers, micro_batches))


# -- worked values -------------------------------------------------------------------


def test_the_worked_example_without_a_limit() -> None:
    found = plan(trace_of(TINY_S), comm_s=1.0, max_drop=1.0)

    assert found.speedup == pytest.approx(1.25)
    assert found.threshold_s == pytest.approx(3.0)
    assert found.dropped_share == pytest.approx(1 / 6)
    assert found.iteration_ratio == pytest.approx(5 / 4)
    assert found.baseline_step_s == pytest.approx(6.0)
    assert found.step_s == pytest.approx(4.0)
    assert found.unlimited.speedup == found.speedup
    assert found.step_s_W == {"w0": 3.5, "w1": 4.5}
    assert found.slowest_share_W == {"w0": 0.5, "w1": 0.5}
    assert found.dropped_share_W == pytest.approx({"w0": 1 / 6, "w1": 1 / 6})
    assert (found.num_steps, found.num_workers, found.num_micro_batches) == (2, 2, 3)
    assert (found.comm_s, found.is_comm_known) == (1.0, True)


def test_the_worked_example_within_ten_percent() -> None:
    """One of twelve may go: the threshold is just above 4."""
    found = plan(trace_of(TINY_S), comm_s=[1.0, 1.0])

    assert found.speedup == pytest.approx(13 / 12)
    assert found.threshold_s == pytest.approx(4.0)
    assert found.dropped_share == pytest.approx(1 / 12)
    assert found.unlimited.speedup == pytest.approx(1.25)


def test_finishing_what_runs_at_the_threshold_has_its_own_best() -> None:
    """At 4 s worker 0 is through and worker 1 has one of four: 7/4 times 5/8."""
    trace = trace_of([[[1.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0]]])

    found = plan(trace, max_drop=1.0)

    assert found.speedup == pytest.approx(7 / 4 * 5 / 8)
    assert found.threshold_s == pytest.approx(4.0)
    assert found.finishing.speedup == pytest.approx(7 / 4 * 5 / 8)
    assert found.finishing.threshold_s is not None
    assert 3.0 < found.finishing.threshold_s <= 4.0  # all that started are through at 4
    assert found.next_line.endswith('threshold_s="auto", max_drop=1.0))')


def test_leaving_a_micro_batch_is_proposed_where_it_gains_more() -> None:
    """The tail is one long micro-batch at the end: finishing it cuts nothing."""
    latency_s_SWM = np.ones((20, 4, 4))
    latency_s_SWM[np.arange(20), np.arange(20) % 4, 3] = 5.0

    found = plan(trace_of(latency_s_SWM))

    assert found.speedup == pytest.approx(8 / 4 * 15 / 16)
    assert found.finishing.threshold_s is None
    assert found.next_line.endswith('max_drop=0.1, preempt="backward"))')


def test_each_drop_rate_has_its_threshold_and_speedup() -> None:
    by_drop = plan(trace_of(TINY_S), comm_s=1.0).by_drop

    assert [point.max_drop for point in by_drop] == [n / 100 for n in range(21)]
    assert by_drop[8].threshold_s == pytest.approx(6.0)
    assert by_drop[8].speedup == pytest.approx(1.0)
    assert by_drop[9].threshold_s == pytest.approx(4.0)
    assert by_drop[9].speedup == pytest.approx(13 / 12)
    assert by_drop[9].dropped_share == pytest.approx(1 / 12)


def test_the_curve_is_that_of_the_paper_s_algorithm() -> None:
    curve = plan(trace_of(TINY_S), comm_s=1.0, max_drop=1.0).curve

    def at(threshold_s: float, values: list[float]) -> float:
        return float(np.interp(threshold_s, curve.threshold_s_K, values))

    # Between two prefix times the speedup falls: the worked values, to the grid's step.
    assert at(2.5, curve.speedup_K) == pytest.approx(1.0238095, abs=2e-3)
    assert at(3.5, curve.speedup_K) == pytest.approx(1.1111111, abs=2e-3)
    assert at(5.0, curve.speedup_K) == pytest.approx(0.9861111, abs=2e-3)
    assert at(5.0, curve.step_speedup_K) == pytest.approx((7 / 6 + 1) / 2, abs=2e-3)
    assert at(5.0, curve.dropped_share_K) == pytest.approx(1 / 12, abs=2e-3)
    assert max(curve.speedup_K) == pytest.approx(1.25)
    assert curve.threshold_s_K == sorted(curve.threshold_s_K)


@real_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "speedup", "dropped_share", "threshold_s", "iteration_ratio"),
    [
        ("bytedance_se", 1.1948, 0.1091, 5.7248, 1.2612),
        ("pai_job_1", 1.0557, 0.0590, 5.2000, 1.0967),
        ("pai_job_2", 1.0921, 0.1360, 8.6230, 1.1244),
    ],
)
def test_real_traces_give_the_specification_s_values(
    name: str,
    speedup: float,
    dropped_share: float,
    threshold_s: float,
    iteration_ratio: float,
) -> None:
    found = plan(read_trace(DATA / f"{name}.csv.gz"), max_drop=1.0)

    assert found.speedup == pytest.approx(speedup, abs=5e-5)
    assert found.dropped_share == pytest.approx(dropped_share, abs=5e-5)
    assert found.threshold_s == pytest.approx(threshold_s, abs=5e-5)
    assert found.iteration_ratio == pytest.approx(iteration_ratio, abs=5e-5)
    assert found.straggler == "moves"


@real_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stragglers"),
    [("bytedance_ar", ["0"]), ("pai_job_4", ["0", "5", "6", "7", "8"])],
)
def test_real_persistent_stragglers_are_named_and_not_dropped_for_ever(
    name: str, stragglers: list[str]
) -> None:
    found = plan(read_trace(DATA / f"{name}.csv.gz"))

    assert found.persistent_stragglers == stragglers
    assert found.straggler == "persists"
    assert found.dropped_share <= 0.10
    assert max(found.dropped_share_W.values()) < 0.5
    assert "rebalance or replace" in found.verdict
    assert found.without_stragglers is not None
    assert found.without_stragglers.baseline_step_s < found.baseline_step_s / 2


# -- estimates -----------------------------------------------------------------------


def sizes(found: Plan) -> list[tuple[int, int]]:
    return [(one.num_workers, one.num_micro_batches) for one in found.estimates]


def test_by_default_half_double_and_four_times_are_estimated() -> None:
    assert sizes(plan(trace_of(noisy(4, 6)))) == [
        (3, 4),
        (12, 4),
        (24, 4),
        (6, 2),
        (6, 8),
    ]
    assert sizes(plan(trace_of(noisy(4, 2, 1)))) == [(4, 1), (8, 1), (2, 2)]


def test_sizes_that_are_asked_for_are_estimated_in_pairs() -> None:
    trace = trace_of(noisy(4, 6))

    assert sizes(plan(trace, num_workers=[3, 6, 12])) == [(3, 4), (12, 4)]
    assert sizes(plan(trace, num_micro_batches=[2])) == [(6, 2)]
    assert sizes(plan(trace, num_workers=[3, 12], num_micro_batches=[2, 4])) == [
        (3, 2),
        (3, 4),
        (12, 2),
        (12, 4),
    ]


def test_an_estimate_meets_a_job_that_was_recorded() -> None:
    """A quarter of 64 independent workers predicts all 64."""
    whole_SWM = noisy(60, 64)
    truth = plan(trace_of(whole_SWM), num_workers=[64])

    (estimate,) = plan(trace_of(whole_SWM[:, :16]), num_workers=[64]).estimates

    assert truth.speedup > 1.1
    assert estimate.speedup == pytest.approx(truth.speedup, rel=0.03)
    assert estimate.baseline_step_s == pytest.approx(truth.baseline_step_s, rel=0.03)
    assert estimate.threshold_s == pytest.approx(truth.threshold_s, rel=0.05)
    assert estimate.dropped_share <= 0.10
    assert estimate.speedup_by_drop[0] == pytest.approx(1.0)
    assert estimate.speedup_by_drop[10] == pytest.approx(
        truth.by_drop[10].speedup, 0.03
    )


@real_traces
@pytest.mark.slow
def test_half_of_a_real_job_predicts_the_whole() -> None:
    whole = read_trace(DATA / "bytedance_se.csv.gz")
    half = Trace(
        whole.latency_s_SWM[:, ::2], None, whole.workers[::2], steps=whole.steps
    )

    (estimate,) = plan(half, num_workers=[32]).estimates

    assert estimate.speedup == pytest.approx(1.193, rel=0.03)
    assert estimate.baseline_step_s == pytest.approx(7.681, rel=0.03)


@pytest.mark.slow
def test_more_workers_than_fit_are_estimated_from_fewer_steps() -> None:
    trace = trace_of(noisy(60, 4, 2))

    (estimate,) = plan(trace, num_workers=[100_000]).estimates

    assert estimate.num_workers == 100_000
    assert estimate.speedup >= 1.0


def test_the_same_trace_gives_the_same_plan() -> None:
    trace = trace_of(noisy(6, 4))

    first = plan(trace, num_workers=[9])

    assert plan(trace, num_workers=[9]).to_json() == first.to_json()
    other = plan(trace, num_workers=[9], rng=np.random.default_rng(1))
    assert other.speedup == first.speedup
    assert other.estimates != first.estimates


# -- what is told ----------------------------------------------------------------------


def test_a_plan_is_one_json_object_without_infinities() -> None:
    found = plan(trace_of(np.ones((3, 2, 2))))

    told = json.loads(found.to_json())

    assert told["threshold_s"] is None
    assert (told["speedup"], told["dropped_share"]) == (1.0, 0.0)
    assert told["step_s"] == told["baseline_step_s"] == 2.0
    assert told["straggler"] == "none"


def test_communication_is_the_trace_s_unless_it_is_given() -> None:
    recorded = trace_of(TINY_S, comm_s_S=np.array([1.0, 1.0]))

    assert plan(recorded).is_comm_known
    assert plan(recorded).comm_s == 1.0
    assert plan(recorded, comm_s=0.5).comm_s == 0.5
    unknown = plan(trace_of(TINY_S))
    assert (unknown.comm_s, unknown.is_comm_known) == (0.0, False)


def test_cut_steps_are_filled_in_and_that_is_told() -> None:
    latency_s_SWM = noisy(20, 4)
    latency_s_SWM[3, 2, 2:] = np.nan

    found = plan(trace_of(latency_s_SWM))

    assert found.imputed_share == pytest.approx(2 / 320)
    assert math.isfinite(found.speedup)
    assert "0.6 % of the micro-batches when the trace was recorded" in found.verdict


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"comm_s": -0.1}, "a communication time is 0 or more seconds"),
        ({"comm_s": math.inf}, "a communication time is 0 or more seconds"),
        ({"comm_s": [1.0]}, r"one for each of 2 steps, not \(1,\)"),
        ({"max_drop": 1.5}, r"max_drop is a share in \[0, 1\], not 1.5"),
        ({"num_workers": [1]}, "--workers is 2 or more, not 1"),
        ({"num_micro_batches": [0]}, "--micro-batches is 1 or more, not 0"),
        ({"num_workers": [9_000_000]}, "or use tailbound simulate"),
    ],
)
def test_an_argument_out_of_its_range_is_told(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(trace_of(TINY_S), **settings)

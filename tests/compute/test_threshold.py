"""The best threshold: the specification's values, real traces, and brute force."""

import csv
import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailbound.compute.threshold import choose, evaluate
from tailbound.errors import ConfigError, ShapeError

F64 = NDArray[np.float64]

DATA = Path(__file__).parents[3] / "shared" / "data"
WORKED = [[[1.0, 1.0, 1.0], [1.0, 1.0, 4.0]], [[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]]]


def brute(t: F64, comm_s_S: F64, tau: float, *, finish: bool) -> tuple[float, float]:
    """Algorithm 2 in loops; with ``finish`` a started micro-batch ends first."""
    speedup, kept_all = 0.0, 0
    num_steps, num_workers, num_micro_batches = t.shape
    for step in range(num_steps):
        kept, longest, cut = 0, 0.0, 0.0
        for worker in range(num_workers):
            time_s, end_s = 0.0, 0.0
            for micro_batch in range(num_micro_batches):
                started = time_s < tau
                time_s = time_s + t[step, worker, micro_batch]
                if started if finish else time_s < tau:
                    kept += 1
                if started:
                    end_s = time_s
            longest = max(longest, time_s)
            cut = max(cut, end_s if finish else min(tau, time_s))
        comm_s = comm_s_S[step]
        kept_all += kept
        speedup += (
            (longest + comm_s)
            / (cut + comm_s)
            * kept
            / (num_workers * num_micro_batches)
        )
    return speedup / num_steps, 1.0 - kept_all / t.size


@pytest.mark.parametrize(
    ("tau", "speedup"),
    [
        (2.5, 1.0238095),
        (3.0, 0.8958333),
        (3.5, 1.1111111),
        (4.0, 1.0),
        (5.0, 0.9861111),
        (6.0, 0.9166667),
        (7.0, 1.0),
    ],
)
def test_the_worked_values_of_the_specification(tau: float, speedup: float) -> None:
    assert evaluate(WORKED, [1.0, 1.0], tau).speedup == pytest.approx(speedup, abs=1e-7)


def test_the_supremum_lies_just_above_a_prefix_time() -> None:
    choice = choose(WORKED, 1.0)

    assert choice.speedup == pytest.approx(1.25)
    assert choice.threshold_s == np.nextafter(3.0, 4.0)
    assert choice.dropped_share == pytest.approx(2 / 12)


def samples() -> st.SearchStrategy[tuple[F64, F64]]:
    """Latencies with many equal ones, and communication that varies by step."""
    return st.tuples(
        st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31)
    ).map(draw)


def draw(sizes: tuple[int, int, int, int]) -> tuple[F64, F64]:
    steps, workers, micro_batches, seed = sizes
    rng = np.random.default_rng(seed)
    latency_s_SWM = rng.integers(1, 9, (steps, workers, micro_batches)) / 4.0
    latency_s_SWM[rng.random(latency_s_SWM.shape) < 0.2] *= 5.0
    return latency_s_SWM, rng.integers(0, 4, steps) / 2.0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(samples(), st.booleans())
def test_no_threshold_is_better_than_the_chosen_one(
    drawn: tuple[F64, F64], finish: bool
) -> None:
    latency_s_SWM, comm_s_S = drawn

    choice = choose(latency_s_SWM, comm_s_S, finish_started=finish)

    prefix_s = np.unique(latency_s_SWM.cumsum(axis=2))
    num_steps, num_workers = latency_s_SWM.shape[:2]
    best = 1.0
    for tau in np.nextafter(np.append(0.0, prefix_s), np.inf):
        kept_W = (latency_s_SWM.cumsum(axis=2) < tau).sum(axis=(0, 2))
        if finish or (kept_W >= num_steps).all():
            best = max(best, brute(latency_s_SWM, comm_s_S, tau, finish=finish)[0])
    # Sums in another order.
    assert choice.speedup == pytest.approx(best, rel=1e-9)
    if math.isfinite(choice.threshold_s):
        speedup, dropped = brute(
            latency_s_SWM, comm_s_S, choice.threshold_s, finish=finish
        )
        assert choice.speedup == pytest.approx(speedup, rel=1e-9)
        assert choice.dropped_share == pytest.approx(dropped)
    assert num_workers == len(choice.dropped_share_W)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(samples(), st.sampled_from([0.0, 0.05, 0.1, 0.3]), st.booleans())
def test_no_more_is_dropped_than_is_allowed(
    drawn: tuple[F64, F64], max_drop: float, finish: bool
) -> None:
    choice = choose(*drawn, max_drop=max_drop, finish_started=finish)

    assert choice.dropped_share <= max_drop
    assert choice.speedup >= 1.0


def read(name: str) -> F64:
    path = DATA / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip("the real traces are not here")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [
            (row["step"], row["worker"], row["micro_batch"], row["seconds"])
            for row in csv.DictReader(file)
        ]
    table = np.array(rows, dtype=np.float64)
    sizes = [len(np.unique(table[:, axis])) for axis in range(3)]
    order = np.lexsort((table[:, 2], table[:, 1], table[:, 0]))
    return np.asarray(table[order, 3].reshape(sizes), dtype=np.float64)


@pytest.mark.parametrize(
    ("name", "speedup", "dropped", "threshold_s", "ratio"),
    [
        ("bytedance_se", 1.1948, 0.1091, 5.7248, 1.2612),
        ("pai_job_1", 1.0557, 0.0590, 5.2000, 1.0967),
        ("pai_job_2", 1.0921, 0.1360, 8.6230, 1.1244),
    ],
)
def test_real_jobs_whose_straggler_moves(
    name: str, speedup: float, dropped: float, threshold_s: float, ratio: float
) -> None:
    choice = choose(read(name), 0.0)

    assert choice.speedup == pytest.approx(speedup, abs=5e-4)
    assert choice.dropped_share == pytest.approx(dropped, abs=1e-4)
    assert choice.threshold_s == pytest.approx(threshold_s, abs=1e-4)
    assert choice.iteration_ratio == pytest.approx(ratio, abs=1e-4)
    assert choice.persistent_stragglers == ()


@pytest.mark.parametrize(
    ("name", "speedup", "dropped", "slow"),
    [
        ("bytedance_ar", 1.9928, 0.1733, (0,)),
        ("pai_job_4", 3.4249, 0.4408, (0, 5, 6, 7, 8)),
    ],
)
def test_real_jobs_with_workers_that_are_always_slow(
    name: str, speedup: float, dropped: float, slow: tuple[int, ...]
) -> None:
    latency_s_SWM = read(name)

    free, capped = choose(latency_s_SWM, 0.0), choose(latency_s_SWM, 0.0, max_drop=0.1)

    assert free.speedup == pytest.approx(speedup, abs=5e-4)
    assert free.dropped_share == pytest.approx(dropped, abs=1e-4)
    assert capped.dropped_share <= 0.1
    assert free.persistent_stragglers == capped.persistent_stragglers == slow
    assert "rebalance or replace rank" in capped.verdict


def test_equal_times_leave_nothing_to_gain() -> None:
    choice = choose(np.ones((5, 3, 4)), 0.5)

    assert choice.threshold_s == math.inf
    assert (choice.speedup, choice.dropped_share, choice.step_s) == (1.0, 0.0, 4.5)
    assert choice.verdict == "no threshold makes training faster"


def test_candidates_are_all_that_is_looked_at() -> None:
    choice = choose(WORKED, 1.0, candidates=[6.0, 3.5, 2.5])

    assert choice.threshold_s == 3.5
    assert choice.curve.threshold_s_K.tolist() == [2.5, 3.5, 6.0]
    assert choice.curve.speedup_K == pytest.approx([1.0238095, 1.1111111, 0.9166667])


def test_cut_steps_are_filled_in_and_that_is_said() -> None:
    latency_s_SWM = np.tile([1.0, 2.0, 3.0], (4, 2, 1))
    latency_s_SWM[3, 1, 2] = np.nan

    choice = choose(latency_s_SWM, 0.0)

    assert choice.imputed_share == pytest.approx(1 / 24)
    assert choice.baseline_step_s == 6.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drop": 1.5}, r"max_drop is a share in \[0, 1\], not 1.5"),
        ({"candidates": [0.0]}, "thresholds of more than 0 seconds"),
        ({"comm_s_S": -1.0}, "communication times are 0 or more seconds"),
    ],
)
def test_values_out_of_range_are_refused(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(WORKED, **({"comm_s_S": 1.0} | arguments))  # type: ignore[arg-type]


def test_communication_times_are_one_a_step() -> None:
    with pytest.raises(ShapeError, match="one number or 2, one a step"):
        choose(WORKED, [1.0, 1.0, 1.0])


@pytest.mark.slow
def test_thirteen_million_samples_take_three_seconds() -> None:
    import time

    rng = np.random.default_rng(0)
    latency_s_SWM = rng.lognormal(-1.0, 0.5, (100, 2048, 64)).astype(np.float32)
    begun_s = time.process_time()

    choice = choose(latency_s_SWM, rng.random(100))

    assert time.process_time() - begun_s < 3.0
    assert choice.speedup == pytest.approx(1.2385287, abs=1e-6)

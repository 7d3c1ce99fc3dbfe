"""Streamed evaluation of thresholds, against the definition and in bounded memory."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.compute.latencies import STRAGGLERS, Workload
from tailbound.compute.noise import (
    BernoulliNoise,
    DelayModel,
    LogNormalNoise,
    NormalNoise,
)
from tailbound.compute.streaming import Cluster, Evaluation, evaluate, pilot_thresholds

F64 = NDArray[np.float64]
STILL = NormalNoise(0.0, 0.0)
CLUSTER = Cluster(
    Workload(LogNormalNoise(), 0.45, STRAGGLERS["uniform"]),
    num_workers=7,
    num_micro_batches=5,
    comm_s=0.3,
    seed=11,
)
TAUS: F64 = np.array([0.2, 1.0, 2.0, 2.7, 3.1, 3.5, 4.0, 5.5, 50.0])


def by_definition(
    cluster: Cluster, num_steps: int, tau: float
) -> tuple[float, float, float]:
    """S_eff, dropped share and mean of min(tau, T), as Algorithm 2 is written."""
    latency_s_SWM = cluster.streams()[0].draw(num_steps, cluster.num_workers)
    planned = cluster.num_workers * cluster.num_micro_batches
    speedups, kept, cut_s = [], 0, []
    for latency_s_WM in latency_s_SWM.tolist():
        finished, slowest_s = 0, 0.0
        for latency_s_M in latency_s_WM:
            time_s = 0.0
            for latency_s in latency_s_M:
                time_s += latency_s
                finished += time_s < tau
            slowest_s = max(slowest_s, time_s)
        cut = min(tau, slowest_s)
        faster = (slowest_s + cluster.comm_s) / (cut + cluster.comm_s)
        speedups.append(faster * finished / planned)
        kept += finished
        cut_s.append(cut)
    return (
        sum(speedups) / num_steps,
        1.0 - kept / (planned * num_steps),
        sum(cut_s) / num_steps,
    )


def test_every_threshold_is_evaluated_as_the_algorithm_is_written() -> None:
    found = evaluate(CLUSTER, TAUS, num_steps=40)

    expected = [by_definition(CLUSTER, 40, tau) for tau in TAUS.tolist()]
    assert found.speedup_K == pytest.approx([row[0] for row in expected])
    assert found.dropped_share_K == pytest.approx([row[1] for row in expected])
    assert found.bounded_step_s_K == pytest.approx([row[2] for row in expected])


def test_means_are_those_of_the_latencies() -> None:
    found = evaluate(CLUSTER, TAUS, num_steps=40)

    latency_s_SWM = CLUSTER.streams()[0].draw(40, 7)
    slowest_s_S = latency_s_SWM.sum(axis=2).max(axis=1)
    assert found.step_s == pytest.approx(slowest_s_S.mean())
    assert found.mean_s == pytest.approx(latency_s_SWM.mean())
    assert found.std_s == pytest.approx(latency_s_SWM.std())


@pytest.mark.parametrize("block_samples", [1, 5, 12, 34, 35, 100, 1000])
def test_results_do_not_depend_on_the_blocks(block_samples: int) -> None:
    """From one worker at a time to all steps at once."""

    def values(found: Evaluation) -> list[float]:
        curves = (found.speedup_K, found.dropped_share_K, found.bounded_step_s_K)
        return [found.step_s, found.mean_s, found.std_s, *np.concatenate(curves)]

    found = evaluate(CLUSTER, TAUS, num_steps=9, block_samples=block_samples)

    whole = evaluate(CLUSTER, TAUS, num_steps=9)
    assert values(found) == pytest.approx(values(whole), rel=1e-12)


def test_what_ends_at_the_threshold_is_dropped() -> None:
    """Two workers of two micro-batches of 1 s: at 1 s none counts, just above half."""
    cluster = Cluster(Workload(STILL, 1.0), 2, 2, comm_s=1.0, seed=0)

    found = evaluate(cluster, np.array([1.0, 1.0000001, 2.0000001]), num_steps=3)

    assert found.dropped_share_K.tolist() == [1.0, 0.5, 0.0]
    assert found.speedup_K == pytest.approx([0.0, 0.75, 1.0])


def test_a_step_that_took_no_time_is_not_sped_up() -> None:
    cluster = Cluster(Workload(NormalNoise(-9.0, 0.0), 0.45), 2, 2, comm_s=0.0, seed=0)

    found = evaluate(cluster, np.array([1.0]), num_steps=2)

    assert found.speedup_K.tolist() == [1.0]


def test_pilot_thresholds_drop_about_what_they_were_chosen_for() -> None:
    cluster = Cluster(Workload(DelayModel(), 1.0), 64, 12, comm_s=0.5, seed=2)
    shares = [0.4, 0.1, 0.02, 0.001]

    threshold_s_K = pilot_thresholds(cluster, shares)

    found = evaluate(cluster, threshold_s_K, num_steps=200)
    assert found.dropped_share_K == pytest.approx(shares, abs=0.004)


def test_pilot_thresholds_stand_just_above_what_they_keep() -> None:
    """Sums of 0.45 s: the last of a cluster is kept, whatever the order of addition."""
    cluster = Cluster(Workload(BernoulliNoise(), 0.45), 20, 12, comm_s=0.5, seed=2)

    threshold_s_K = pilot_thresholds(cluster, np.linspace(0.0, 0.75, 31))

    above_s_K = threshold_s_K - 0.45 * np.round(threshold_s_K / 0.45)
    assert above_s_K.min() > 1e-10
    assert above_s_K.max() < 1e-7


def test_thresholds_of_a_job_without_time_are_none() -> None:
    cluster = Cluster(Workload(NormalNoise(-9.0, 0.0), 0.45), 2, 2, comm_s=0.5, seed=0)

    assert len(pilot_thresholds(cluster, [0.0, 0.5])) == 0


@pytest.mark.slow
def test_memory_does_not_grow_with_workers_or_steps() -> None:
    """One step of 100 000 workers takes 9.6 MB for each array of its latencies."""

    def peak_bytes(workers: int, steps: int) -> int:
        cluster = Cluster(
            Workload(LogNormalNoise(), 0.45), workers, 12, comm_s=0.5, seed=0
        )
        thresholds = pilot_thresholds(cluster, np.linspace(0.0, 0.5, 100))
        tracemalloc.start()
        evaluate(cluster, thresholds, num_steps=steps)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(100_000, 2) < 12e6
    assert peak_bytes(2, 50_000) < 12e6

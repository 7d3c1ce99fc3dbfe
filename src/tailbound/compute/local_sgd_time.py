"""What stragglers cost Local-SGD, and what a compute threshold on top gives back.

Local-SGD averages parameters once every H local steps, so workers wait for the slowest
sum of H local steps. Waits that hit all workers alike average out over a period; as
many waits on one server do so much less, and a worker that always waits not at all. A
threshold over the local steps of a period bounds each of them. As far as time goes, a
period of H local steps is a step of H micro-batches.

Source: DropCompute, app:local_sgd, figure local_sgd; spec C8.
"""

from collections.abc import Sequence

import msgspec

from tailbound.compute.latencies import Stragglers, Workload
from tailbound.compute.noise import Noise, NormalNoise
from tailbound.compute.streaming import Cluster, evaluate, pilot_thresholds
from tailbound.config import require

JITTER = NormalNoise(mean_s=0.0, std_s=0.02)
"""What local steps differ in without stragglers: a twentieth, as on a tuned system."""


class LocalSgdPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One synchronization period: a place on the x-axis of figure local_sgd."""

    sync_period: int
    """Local steps between two averages (H)."""
    local_step_s: float
    """Time of a local step with Local-SGD: of a period, divided by H."""
    speedup: float
    """Of Local-SGD: time of a synchronous step / local_step_s."""
    threshold_s: float
    """Compute time in a period after which a worker stops."""
    dropped_share: float
    """Share of the local steps that the threshold drops."""
    bounded_local_step_s: float
    """Time of a planned local step with the threshold."""
    bounded_speedup: float
    """Of both, in step time as in the paper: synchronous / bounded_local_step_s."""
    bounded_effective_speedup: float
    """The same per local step that was not dropped."""


def local_sgd_scenario(
    stragglers: Stragglers,
    sync_periods: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    num_workers: int = 32,
    base_s: float = 0.45,
    comm_s: float = 0.0,
    jitter: Noise = JITTER,
    dropped_share: float = 0.062,
    num_local_steps: int = 16_000,
    seed: int = 0,
) -> list[LocalSgdPoint]:
    """Simulate Local-SGD among stragglers, without and with a threshold.

    Args:
        stragglers: who waits, how often and how long; see ``latencies.STRAGGLERS``.
        sync_periods: local steps between two averages, each >= 1.
        num_workers: 32 in the paper.
        base_s: a local step without jitter and waits, in seconds.
        comm_s: time of an average, in seconds. 0: only what stragglers cost.
        jitter: added to each local step.
        dropped_share: of local steps, in (0, 1), that the threshold is chosen for.
        num_local_steps: to simulate for each period, at least one period.
        seed: >= 0.

    Returns:
        A point for each period; speedups are over synchronous training, which is a
        period of 1 without a threshold.

    Raises:
        ConfigError: an argument is out of its range.

    Source: app:local_sgd (about 6.2 % dropped).
    """
    require(
        all(period >= 1 for period in sync_periods),
        f"sync_periods are 1 or more local steps each, not {list(sync_periods)}",
    )
    require(num_workers >= 1, f"num_workers is 1 or more, not {num_workers}")
    require(
        num_local_steps >= 1, f"num_local_steps is 1 or more, not {num_local_steps}"
    )
    require(
        0.0 < dropped_share < 1.0, f"dropped_share is in (0, 1), not {dropped_share}"
    )
    workload = Workload(jitter, base_s, stragglers)

    def simulate_period(sync_period: int) -> tuple[float, float, float, float]:
        cluster = Cluster(workload, num_workers, sync_period, comm_s, seed)
        threshold_s_K = pilot_thresholds(cluster, [dropped_share])
        periods = max(1, num_local_steps // sync_period)
        found = evaluate(cluster, threshold_s_K, num_steps=periods)
        return (
            (found.step_s + comm_s) / sync_period,
            float(found.threshold_s_K[0]),
            float(found.dropped_share_K[0]),
            float(found.bounded_step_s_K[0] + comm_s) / sync_period,
        )

    synchronous_s = simulate_period(1)[0]
    points = []
    for sync_period in sync_periods:
        local_step_s, threshold_s, dropped, bounded_s = simulate_period(sync_period)
        points.append(
            LocalSgdPoint(
                sync_period=sync_period,
                local_step_s=local_step_s,
                speedup=synchronous_s / local_step_s,
                threshold_s=threshold_s,
                dropped_share=dropped,
                bounded_local_step_s=bounded_s,
                bounded_speedup=synchronous_s / bounded_s,
                bounded_effective_speedup=(1.0 - dropped) * synchronous_s / bounded_s,
            )
        )
    return points

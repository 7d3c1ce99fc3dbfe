"""Scale graphs: what DropCompute gains with more and more workers, simulated.

For each number of workers a cluster is simulated without a threshold and with many; the
best stands beside what theory predicts from mean and variance alone.

Source: DropCompute, figures abstract, noise_type, noise_scale; spec C5.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tailbound.compute import theory
from tailbound.compute.latencies import STRAGGLERS, Stragglers, Workload
from tailbound.compute.noise import Noise, make_noise
from tailbound.compute.streaming import Cluster, evaluate, pilot_thresholds
from tailbound.config import require

DEFAULT_WORKERS = (1, 16, 200, 2048)
DROPPED_SHARE_K = np.union1d(np.linspace(0.0, 0.75, 301), np.geomspace(1e-4, 0.1, 80))
"""Thresholds tried: those that drop about so much, closer together near 0."""
DEFAULT_SAMPLES = 16_000_000
"""Micro-batches that are simulated for each number of workers, within these steps: E[T]
is then met within 1 % with the paper's tables."""
LEAST_STEPS, MOST_STEPS = 100, 2000


class ScalePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated cluster of so many workers: one row of a scale graph."""

    workers: int
    steps: int
    """Steps simulated."""
    step_s: float
    """E[T]: mean compute time of the slowest worker, without a threshold."""
    worker_step_s: float
    """E[T_i]: mean compute time of a worker."""
    iteration_ratio: float
    """step_s / worker_step_s: how far a step is beyond its average worker."""
    threshold_s: float | None
    """The best threshold; None: none gains anything, the rest is then without one."""
    speedup: float
    """S_eff with that threshold, >= 1."""
    dropped_share: float
    """Share of the micro-batches that it drops."""
    bounded_step_s: float
    """Mean of min(threshold, T): compute time of a step with the threshold."""
    baseline_micro_batches_per_s: float
    """Throughput of all workers without a threshold, communication included."""
    bounded_micro_batches_per_s: float
    """Throughput with the threshold, only of micro-batches that were not dropped."""
    linear_micro_batches_per_s: float
    """Throughput if no worker ever waited for another."""
    theory_step_s: float
    """E[T] of eq:estimate_T, from mean and variance of the micro-batches."""
    theory_threshold_s: float | None
    """tau* of theory, the same for any number of workers; None: it gains nothing."""
    theory_speedup: float
    """E[S_eff] of eq:eff_speedup at that threshold ("analytical"), >= 1."""
    theory_speedup_given_step: float
    """The same with the simulated E[T] ("analytical given E[T]"), >= 1."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """A scale graph, with what it was made from."""

    noise: str
    variance_s2: float | None
    """Of the noise; None: the parameters printed in the paper."""
    stragglers: str | None
    num_micro_batches: int
    base_s: float
    comm_s: float
    max_drop: float
    seed: int
    points: list[ScalePoint]
    """One for each number of workers, in the order asked for."""

    def to_json(self) -> str:
        """As JSON for people and programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def simulate(
    noise: str,
    workers: Sequence[int] = DEFAULT_WORKERS,
    num_micro_batches: int = 12,
    base_s: float = 0.45,
    comm_s: float = 0.5,
    seed: int = 0,
    *,
    steps: int | None = None,
    max_drop: float = 1.0,
    variance: float | None = None,
    stragglers: str | None = None,
) -> Simulation:
    """Make a scale graph from the options of ``tailbound simulate``.

    Args:
        noise: added to each micro-batch: lognormal, normal, bernoulli, exponential,
            gamma or delay.
        workers: numbers of workers, each >= 1.
        num_micro_batches: of a worker in a step, >= 1.
        base_s: a micro-batch without noise, > 0.
        comm_s: communication time of a step, >= 0.
        seed: >= 0; the same options and seed give the same graph.
        steps: to simulate for each number of workers. None: 16 million micro-batches,
            but 100 to 2000 steps.
        max_drop: share in [0, 1] of the micro-batches that may be dropped at most.
        variance: of the noise, in square seconds; see ``noise.make_noise``.
        stragglers: ``uniform`` or ``one_server``: workers that wait 1 s now and then.

    Raises:
        ConfigError: an option is out of its range; names the option.
    """
    require(
        len(workers) > 0 and all(count >= 1 for count in workers),
        f"--workers is one or more numbers, each 1 or more, not {list(workers)}",
    )
    for option, count, least in (
        ("--micro-batches", num_micro_batches, 1),
        ("--steps", 1 if steps is None else steps, 1),
        ("--seed", seed, 0),
    ):
        require(count >= least, f"{option} is {least} or more, not {count}")
    require(
        base_s > 0.0 and math.isfinite(base_s),
        f"--base is above 0 seconds, not {base_s}",
    )
    require(
        comm_s >= 0.0 and math.isfinite(comm_s),
        f"--comm-time is 0 or more seconds, not {comm_s}",
    )
    require(0.0 <= max_drop <= 1.0, f"--max-drop is a share in [0, 1], not {max_drop}")
    require(
        stragglers is None or stragglers in STRAGGLERS,
        f"--stragglers is one of {', '.join(STRAGGLERS)}, not {stragglers!r}",
    )
    points = scale_graph(
        make_noise(noise, base_s=base_s, variance_s2=variance),
        workers,
        num_micro_batches=num_micro_batches,
        base_s=base_s,
        comm_s=comm_s,
        seed=seed,
        steps=steps,
        max_drop=max_drop,
        stragglers=None if stragglers is None else STRAGGLERS[stragglers],
    )
    return Simulation(
        noise=noise,
        variance_s2=variance,
        stragglers=stragglers,
        num_micro_batches=num_micro_batches,
        base_s=base_s,
        comm_s=comm_s,
        max_drop=max_drop,
        seed=seed,
        points=points,
    )


def scale_graph(
    noise: Noise,
    workers: Sequence[int] = DEFAULT_WORKERS,
    *,
    num_micro_batches: int = 12,
    base_s: float = 0.45,
    comm_s: float = 0.5,
    seed: int = 0,
    steps: int | None = None,
    max_drop: float = 1.0,
    stragglers: Stragglers | None = None,
) -> list[ScalePoint]:
    """Simulate clusters with more and more workers.

    A point depends on the seed and its own number of workers, not on the others. The
    memory does not grow with workers or steps.

    Args:
        noise: added to each micro-batch.
        workers: numbers of workers, each >= 1.
        num_micro_batches: of a worker in a step, >= 1.
        base_s: a micro-batch without noise, in seconds, > 0.
        comm_s: communication time of a step, in seconds, >= 0.
        seed: >= 0.
        steps: to simulate for each number of workers; None: see :func:`simulate`.
        max_drop: share in [0, 1] of the micro-batches that may be dropped at most.
        stragglers: workers that wait now and then besides.

    Returns:
        A point for each number of workers.
    """
    workload = Workload(noise, base_s, stragglers)
    clusters = [
        Cluster(workload, count, num_micro_batches, comm_s, seed) for count in workers
    ]
    return [
        simulate_cluster(
            cluster, default_steps(cluster) if steps is None else steps, max_drop
        )
        for cluster in clusters
    ]


def default_steps(cluster: Cluster) -> int:
    """Steps for DEFAULT_SAMPLES, within the limits."""
    steps = DEFAULT_SAMPLES // (cluster.num_workers * cluster.num_micro_batches)
    return min(max(steps, LEAST_STEPS), MOST_STEPS)


def simulate_cluster(cluster: Cluster, num_steps: int, max_drop: float) -> ScalePoint:
    """One point of a scale graph."""
    threshold_s_K = pilot_thresholds(cluster, DROPPED_SHARE_K)
    found = evaluate(cluster, threshold_s_K, num_steps=num_steps)
    worker_step_s = cluster.num_micro_batches * found.mean_s
    threshold_s, speedup, dropped_share = None, 1.0, 0.0
    bounded_step_s = found.step_s
    speedup_K = np.where(found.dropped_share_K <= max_drop, found.speedup_K, 0.0)
    if len(speedup_K) > 0 and speedup_K.max() > 1.0:
        best = int(np.argmax(speedup_K))
        threshold_s, speedup = float(threshold_s_K[best]), float(speedup_K[best])
        dropped_share = float(found.dropped_share_K[best])
        bounded_step_s = float(found.bounded_step_s_K[best])
    planned = cluster.num_workers * cluster.num_micro_batches
    theory_step_s = theory.expected_step_s(
        found.mean_s,
        found.std_s,
        num_micro_batches=cluster.num_micro_batches,
        num_workers=cluster.num_workers,
    )
    theory_threshold_s = theory.best_threshold_s(
        found.mean_s,
        found.std_s,
        num_micro_batches=cluster.num_micro_batches,
        comm_s=cluster.comm_s,
        max_drop=max_drop,
    )
    theory_speedup, given_step = (
        max(
            1.0,
            theory.expected_speedup(
                theory_threshold_s,
                found.mean_s,
                found.std_s,
                num_micro_batches=cluster.num_micro_batches,
                step_s=step_s,
                comm_s=cluster.comm_s,
            ),
        )
        for step_s in (theory_step_s, found.step_s)
    )
    return ScalePoint(
        workers=cluster.num_workers,
        steps=num_steps,
        step_s=found.step_s,
        worker_step_s=worker_step_s,
        iteration_ratio=found.step_s / worker_step_s,
        threshold_s=threshold_s,
        speedup=speedup,
        dropped_share=dropped_share,
        bounded_step_s=bounded_step_s,
        baseline_micro_batches_per_s=planned / (found.step_s + cluster.comm_s),
        bounded_micro_batches_per_s=(
            planned * (1.0 - dropped_share) / (bounded_step_s + cluster.comm_s)
        ),
        linear_micro_batches_per_s=planned / (worker_step_s + cluster.comm_s),
        theory_step_s=theory_step_s,
        theory_threshold_s=theory_threshold_s if theory_speedup > 1.0 else None,
        theory_speedup=theory_speedup,
        theory_speedup_given_step=given_step,
    )

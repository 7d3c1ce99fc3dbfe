"""Plans to show, made from small traces."""

import numpy as np

from tailbound.compute.planner import plan
from tailbound.compute.plans import Plan
from tailbound.compute.samples import Floats
from tailbound.compute.traces import Trace


def make_plan(
    *, stragglers: int = 0, name: str = "w", cut: bool = False, workers: int = 6
) -> tuple[Plan, Floats]:
    """A plan and its latencies: 0.1 s with a heavy tail, some workers 3 times as slow.

    Args:
        stragglers: workers that are slow all the time.
        name: worker names begin with it.
        cut: a threshold cut every step of the first worker.
        workers: in the trace.
    """
    rng = np.random.default_rng(0)
    latency_s_SWM = 0.1 + 0.05 * rng.lognormal(0.0, 1.0, (24, workers, 4))
    latency_s_SWM[:, :stragglers] *= 3.0
    if cut:
        latency_s_SWM[:, 0, 3] = np.nan
    names = tuple(f"{name}{number}" for number in range(workers))
    trace = Trace(latency_s_SWM, None, names, tuple(range(24)))
    return plan(trace), latency_s_SWM

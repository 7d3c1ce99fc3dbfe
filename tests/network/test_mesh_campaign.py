"""Seeded steps over a bad network: all replicas hold the same means."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.config import Holes, LossBound, Order
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.chunks import allowed_missing
from tailbound.protocol.events import Reduced
from tailbound.reduction import FORMATS, narrow
from tailbound.testing import FakeMesh

# Computing only: slow under coverage on a busy machine.
pytestmark = pytest.mark.timeout(180)


@dataclass
class Plan:
    """One job drawn from a seed."""

    seed: int
    rng: np.random.Generator = field(init=False)
    world_size: int = field(init=False)
    sizes: list[int] = field(init=False)
    dtype: str = field(init=False)
    bound: LossBound = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = np.random.default_rng(self.seed)
        self.world_size = int(rng.integers(2, 9))
        self.sizes = rng.integers(1, 6_000, size=rng.integers(1, 4)).tolist()
        self.dtype = str(rng.choice(list(FORMATS)))
        p = float(rng.choice([0.0, 0.01, 0.4, 0.8]))
        holes: list[Holes] = ["zero", "received_mean", "residual"]
        orders: list[Order] = ["rotate", "norm", "fixed"]
        self.bound = LossBound(
            p_low=p,
            p_high=max(p, 0.8),
            frequency=2,
            holes=holes[rng.integers(3)],
            p_back=float(rng.choice([0.0, 0.0, 0.3])),
            order=orders[rng.integers(3)],
            per_layer=bool(rng.integers(2)),
        )

    @property
    def impairments(self) -> Impairments:
        rng = self.rng
        return Impairments(
            losses=(IndependentLoss(rate=float(rng.choice([0.0, 0.05, 0.3, 0.7]))),),
            delay_s=0.001,
            jitter_s=float(rng.choice([0.0, 0.001])),
            reorder_share=float(rng.choice([0.0, 0.1])),
            duplicate_share=float(rng.choice([0.0, 0.1])),
        )

    def gradients(self, size: int) -> list[NDArray[Any]]:
        fmt = FORMATS[self.dtype]
        return [
            narrow(self.rng.standard_normal(size).astype(fmt.sum), fmt)
            for _ in range(self.world_size)
        ]


def run_step(net: FakeMesh, plan: Plan, step: int) -> None:
    """All ranks reduce all buckets of a step, each rank beginning when it likes."""
    grads = [plan.gradients(size) for size in plan.sizes]
    before = [[grad.copy() for grad in bucket] for bucket in grads]
    weight_W = plan.rng.choice([0.0, 1.0, 2.0], size=plan.world_size).tolist()
    for rank in plan.rng.permutation(plan.world_size).tolist():
        for number, bucket in enumerate(grads):
            net.ranks[rank].all_reduce(
                bucket[rank],
                weight_W[rank],
                net.now,
                dtype=plan.dtype,
                step=step,
                is_last=number == len(grads) - 1,
                ends_L=(1, len(bucket[rank])) if plan.bound.per_layer else (),
            )
        net.run_for(float(plan.rng.choice([0.0, 2e-4, 3e-3])))
    events_W: list[list[Reduced]] = [[] for _ in range(plan.world_size)]
    for _ in grads:
        for found, event in zip(events_W, net.run_until(Reduced), strict=True):
            found.append(event)
    for found in events_W:
        found.sort(key=lambda event: event.counter)
    check_alike(plan, grads, before, weight_W, events_W)


def check_alike(
    plan: Plan,
    grads: list[list[NDArray[Any]]],
    before: list[list[NDArray[Any]]],
    weight_W: list[float],
    events_W: list[list[Reduced]],
) -> None:
    for number, bucket in enumerate(grads):
        told = {
            (event.counter, event.p, event.critical, repr(event.norm), event.verdict)
            for event in (found[number] for found in events_W)
        }
        assert len(told) == 1
        if not sum(weight_W):
            for grad, old in zip(bucket, before[number], strict=True):
                assert grad.tobytes() == old.tobytes()
            continue
        if not plan.bound.p_back:
            assert len({grad.tobytes() for grad in bucket}) == 1
        for found in events_W:
            for report in found[number].reports:
                assert report.missing <= allowed_missing(report.p, report.num_chunks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_replicas_stay_alike_whatever_is_lost(seed: int) -> None:
    plan = Plan(seed)
    net = FakeMesh(plan.world_size, plan.bound, impairments=plan.impairments, seed=seed)
    net.start()

    for step in range(3):
        run_step(net, plan, step)

    net.close()


@pytest.mark.slow
def test_sixty_four_ranks_reduce() -> None:
    net = FakeMesh(64, LossBound.fixed(0.0))
    net.start()
    grads = [np.full(64_000, rank, np.float32) for rank in range(64)]

    net.all_reduce(grads, [1.0] * 64)

    # The mean of 0 to 63.
    assert all((grad == 31.5).all() for grad in grads)

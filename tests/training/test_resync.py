"""Replicas that a lossy way back let drift are made equal: by whom, when, how far."""

from typing import Any

import pytest
import torch

import tailbound
from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.buckets import state_bytes
from tailbound.training.job import Job
from training.mesh_ranks import run_mesh
from training.ranks import TIMEOUT_S, Vector, plain_sgd, run_ranks

pytestmark = pytest.mark.sockets

LOSSY = Transport(
    mtu=1500,
    timeout_s=TIMEOUT_S,
    impairments=Impairments(losses=(IndependentLoss(rate=0.6),)),
)


def bound(resync_every: int) -> LossBound:
    return LossBound(p_low=0.0, p_high=0.0, p_back=0.5, resync_every=resync_every)


def train(job: Job, model: Vector, steps: int, value: float = 1.0) -> list[Any]:
    """Gradients of one value, so SGD of rate 1 takes it off each weight a step."""
    reports = []
    for _ in range(steps):
        job.backward(model(torch.full((1, 4000), value)))
        reports.append(job.step())
    return reports


def test_parameters_are_those_of_their_owners_and_no_update_is_lost() -> None:
    """Five steps of 1 for every weight, in all replicas, after the fifth."""

    def work(rank: int, make_exchange: MakeExchange) -> tuple[Any, ...]:
        model = Vector(4000)
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            before = train(job, model, 4)
            drifted = state_bytes(model)
            (last,) = train(job, model, 1)
            job.check_replicas()
        return [r.drift for r in before], drifted, last.drift, set(model.w.tolist())

    outcomes = run_mesh(work, bound=bound(5), transport=LOSSY)

    (told, first, drift, weights), (_, second, _, others) = outcomes
    assert told == [None] * 4
    assert first != second
    # An element that misses 1 to 4 of 5 updates differs by up to 4 from 5.
    assert 0.0 < drift < 0.8
    assert weights == others == {-5.0}


def test_what_was_owed_is_not_paid_twice() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> tuple[float, set[float]]:
        model = Vector(4000)
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            train(job, model, 3)
            drift = job.resync()
            train(job, model, 10, value=0.0)
            job.check_replicas()
        return drift, set(model.w.tolist())

    outcomes = run_mesh(work, bound=bound(100), transport=LOSSY)

    assert all(drift > 0.0 for drift, _ in outcomes)
    assert [weights for _, weights in outcomes] == [{-3.0}, {-3.0}]


def test_a_checkpoint_is_the_same_on_every_rank() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> tuple[bytes, int]:
        model = Vector(4000)
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            train(job, model, 3)
            state = job.state_dict()
            return state_bytes(model), state["step"]

    first, second = run_mesh(work, bound=bound(100), transport=LOSSY)

    assert first == second
    assert first[1] == 3


def test_with_an_exact_way_back_there_is_nothing_to_do() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> tuple[float, Any]:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            job.backward(model(torch.ones(1, 1)))
            report = job.step()
            return job.resync(), report.drift

    assert run_mesh(work) == [(0.0, None)] * 2
    assert run_ranks(work) == [(0.0, None)] * 2


def test_zeros_that_agree_are_not_apart() -> None:
    """The norm of the parameters is 0, which nothing can be divided by."""

    def work(rank: int, make_exchange: MakeExchange) -> float:
        model = Vector(4000)
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            return job.resync()

    assert run_mesh(work, bound=bound(1)) == [0.0, 0.0]


def test_parameters_in_two_dtypes_are_made_equal() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(3000, dtype=torch.float64))
            self.b = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

        def forward(self) -> torch.Tensor:
            return self.a.sum() + self.b.sum().double()

    def work(rank: int, make_exchange: MakeExchange) -> tuple[Any, ...]:
        model = Mixed()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            for _ in range(3):
                job.backward(model())
                job.step()
            job.resync()
            job.check_replicas()
        return set(model.a.tolist()), model.b.tolist()

    outcomes = run_mesh(work, num=3, bound=bound(100), transport=LOSSY)

    assert outcomes == [({-3.0}, [-3.0] * 5)] * 3


def test_the_server_plan_refuses_a_lossy_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Vector()

    with pytest.raises(ConfigError, match=r'p_back=0\.5 needs .*plan="sharded"'):
        tailbound.attach(
            model,
            plain_sgd(model),
            network=bound(1),
            transport=Transport(plan="server", server="127.0.0.1:1"),
        )

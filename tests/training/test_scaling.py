"""A GradScaler over two ranks' gradients: one decision, whatever was lost."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from field.dropping import holds_inf, losing
from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError
from tailbound.records import StepReport
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.buckets import FlatBucket
from tailbound.training.exchange import LocalExchange
from tailbound.training.scaling import step_optimizer
from training.mesh_ranks import run_mesh
from training.ranks import Vector, plain_sgd, run_ranks

SIZE = 1000
"""Float32 elements: three chunks at 1500 bytes."""


def two_steps(rank: int, make: MakeExchange) -> tuple[Any, ...]:
    """In the first step rank 1's last gradient element overflows.

    Returns:
        First and last weight after each step, scale after each, and the reports.
    """
    model = Vector(SIZE)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    weights, scales = [], []
    reports: list[StepReport] = []
    with attach_through(make, model, plain_sgd(model)) as job:
        for last in (math.inf, 3.0):
            x = torch.full((1, SIZE), 1.0 + 2.0 * rank)
            if rank == 1:
                x[0, -1] = last
            job.backward(scaler.scale(model(x)))
            reports.append(job.step(scaler=scaler))
            weights.append((model.w[0].item(), model.w[-1].item()))
            scales.append(scaler.get_scale())
        job.check_replicas()
    return weights, scales, reports


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all() -> None:
    outcomes = run_ranks(two_steps)

    for weights, scales, (first, second) in outcomes:
        # The mean of 1 and 3, at a rate of 1, in the second step only.
        assert weights == [(0.0, 0.0), (-2.0, -2.0)]
        assert scales == [4.0, 4.0]
        assert (first.non_finite, second.non_finite) == (True, False)
        assert (first.loss_scale, second.loss_scale) == (8.0, 4.0)
        assert first.verdict == "norm not finite: ignored"
        assert second.norm == pytest.approx(2.0 * math.sqrt(SIZE))  # float32 squares
        assert not first.skipped


def test_an_overflow_whose_chunk_was_given_up_leaves_out_no_step() -> None:
    with losing(lambda header, data: holds_inf(data)):
        outcomes = run_ranks(
            two_steps,
            bound=LossBound.fixed(0.4),
            transport=Transport(mtu=1500, timeout_s=20.0),
        )

    (weights, scales, reports), (other_weights, other_scales, _) = outcomes
    assert weights == other_weights
    assert scales == other_scales == [8.0, 8.0]
    assert [report.non_finite for report in reports] == [False, False]
    assert weights[0][0] != 0.0
    assert math.isfinite(weights[0][1])


def test_the_loss_in_the_report_is_without_the_scale() -> None:
    def work(rank: int, make: MakeExchange) -> float | None:
        model = Vector()
        with attach_through(make, model, plain_sgd(model)) as job:
            with torch.no_grad():
                model.w.fill_(5.0)
            job.backward(8.0 * model(torch.tensor([[2.0]])))
            return job.step(loss_scale=8.0).loss

    assert run_ranks(work) == [10.0, 10.0]


def test_a_nan_without_a_scaler_is_counted() -> None:
    def work(rank: int, make: MakeExchange) -> bool:
        model = Vector()
        with attach_through(make, model, plain_sgd(model)) as job:
            job.backward(model(torch.tensor([[math.nan if rank else 1.0]])))
            return job.step().non_finite

    assert run_ranks(work) == [True, True]


def test_a_scaler_and_a_loss_scale_are_one_too_many() -> None:
    def work(rank: int, make: MakeExchange) -> None:
        model = Vector()
        with attach_through(make, model, plain_sgd(model)) as job:
            job.step(loss_scale=2.0, scaler=GradScaler("cpu"))

    outcomes = run_ranks(work)

    assert any(
        isinstance(error, ConfigError)
        and str(error).startswith("step() got scaler and loss_scale=2.0; give one")
        for error in outcomes
    )


def test_a_scaler_that_is_off_steps_as_if_there_was_none() -> None:
    def work(rank: int, make: MakeExchange) -> tuple[float, float]:
        model = Vector()
        scaler = GradScaler("cpu", enabled=False)
        with attach_through(make, model, plain_sgd(model)) as job:
            job.backward(scaler.scale(model(torch.tensor([[2.0]]))))
            report = job.step(scaler=scaler)
        return model.w.item(), report.loss_scale

    assert run_ranks(work) == [(-2.0, 1.0), (-2.0, 1.0)]


class OneOther(LocalExchange):
    """The other of two ranks says whether it received what is not finite."""

    resync_every = 100

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.other = bytes([other])
        self.told: list[bytes] = []

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        self.told.append(data)
        return data, self.other


@pytest.mark.parametrize(
    ("own", "other", "weight", "scale"),
    [
        (2.0, False, -2.0, 8.0),
        (2.0, True, 0.0, 4.0),
        (math.inf, False, 0.0, 4.0),
        (math.nan, True, 0.0, 4.0),
    ],
)
def test_with_a_lossy_way_back_ranks_ask_each_other(
    own: float, other: bool, weight: float, scale: float
) -> None:
    """The other rank missed the chunk, or this one did."""
    model = Vector()
    optimizer = plain_sgd(model)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    bucket = FlatBucket(torch.float32, [("w", model.w)])
    bucket.flat[:] = 8.0 * own
    bucket.push()
    exchange = OneOther(other=other)

    with contextlib.closing(exchange):
        left_out = step_optimizer(optimizer, scaler, exchange, [bucket])

    assert exchange.told == [bytes([not math.isfinite(own)])]
    assert left_out == (weight == 0.0)
    assert (model.w.item(), scaler.get_scale()) == (weight, scale)


def test_s10_an_inf_that_one_rank_never_received_counts_for_both() -> None:
    """Rank 1 owns the shard with the inf; towards rank 0 its chunk is always lost.

    In step 2. The scale halves, and doubles after two steps that are finite.
    """

    def six_steps(rank: int, make: MakeExchange) -> tuple[Any, ...]:
        model = Vector(4 * SIZE)
        scaler = GradScaler("cpu", init_scale=65536.0, growth_interval=2)
        scales, reports = [], []
        with attach_through(make, model, plain_sgd(model)) as job:
            for step in range(1, 7):
                x = torch.ones(1, 4 * SIZE)
                if (rank, step) == (1, 2):
                    x[0, -1] = math.inf
                job.backward(scaler.scale(model(x)))
                reports.append(job.step(scaler=scaler))
                scales.append(scaler.get_scale())
            job.resync()
            job.check_replicas()
        return scales, [r.non_finite for r in reports], set(model.w.tolist())

    bound = LossBound(p_low=0.0, p_high=0.0, p_back=0.2, resync_every=100)
    with losing(lambda header, data: holds_inf(data)):
        outcomes = run_mesh(
            six_steps, bound=bound, transport=Transport(mtu=1500, timeout_s=20.0)
        )

    expected = [65536.0, 32768.0, 32768.0, 65536.0, 65536.0, 131072.0]
    left_out = [False, True, False, False, False, False]
    assert outcomes == 2 * [(expected, left_out, {-5.0})]

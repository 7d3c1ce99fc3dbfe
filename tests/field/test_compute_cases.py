"""FIELD.md's cases of the compute bound: S01 to S05, A01, A05, A11, A14.

S06 is in ``training/test_clocks.py`` and here, A15 in ``training/test_samplers.py``.
"""

import json
import logging
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailbound.compute.budget import Budget
from tailbound.config import ComputeBound
from tailbound.errors import RemoteError
from tailbound.records import Record, StepReport
from tailbound.training.accumulate import Accumulation
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.clocks import EventClock
from training.fakes import FakeDevice, HandClock
from training.ranks import Vector, finish, plain_sgd, run_ranks, start_ranks

pytestmark = pytest.mark.sockets

TAU = ComputeBound(threshold_s=1.0)


def one_step(
    rank: int,
    make_exchange: MakeExchange,
    x_WM: list[list[float]],
    *,
    slow_s: float = 0.0,
    late_s: float = 0.0,
    weight_WM: list[list[float]] | None = None,
    bound: ComputeBound | None = TAU,
) -> list[Any]:
    """One step on hand clocks; -w (the gradient), and what the report says.

    Rank 1's micro-batches take ``slow_s``; its step starts ``late_s`` too late.
    """
    hand = HandClock()
    clock = hand.clock()
    model = Vector()
    inputs = torch.tensor(x_WM[rank]).view(-1, 1)
    weights = iter(weight_WM[rank] if weight_WM else [1.0] * len(inputs))
    with attach_through(
        make_exchange,
        model,
        plain_sgd(model),
        micro_batches=max(2, len(inputs)),
        compute=bound,
        clock=clock,
    ) as job:
        parts = job.micro_batches(inputs)
        if late_s and rank == 1:
            begin, clock.begin = clock.begin, lambda: (begin(), hand.pass_s(late_s))[0]  # type: ignore[method-assign, func-returns-value]
        for x in parts:
            job.backward(model(x), weight=next(weights))
            if rank == 1:
                hand.pass_s(slow_s)
        report = job.step()
        return [
            -model.w.item(),
            report.step,
            report.total_computed,
            report.total_planned,
            report.skipped,
        ]


X_WM = [[2.0, 6.0, 1.0], [10.0, 14.0, 3.0]]


def test_s01_one_reduction_covers_all_that_was_accumulated() -> None:
    outcomes = run_ranks(partial(one_step, x_WM=X_WM))

    assert outcomes == 2 * [[6.0, 1, 6.0, 6, False]]


def test_s01_also_when_the_last_micro_batch_is_only_known_afterwards() -> None:
    outcomes = run_ranks(partial(one_step, x_WM=X_WM, slow_s=1.5))

    assert outcomes == 2 * [[4.75, 1, 4.0, 6, False]]


@pytest.mark.slow
@pytest.mark.processes
def test_s01_ddp_makes_one_exchange_a_step_with_equal_gradients() -> None:
    for code, output, errors in finish(start_ranks("ddp_threshold")):
        assert code == 0, errors
        # All six; then rank 1 stops after one of three.
        assert json.loads(output) == {
            "grads": [6.0, 4.75],
            "exchanges": [1, 1],
            "ddp_again": [2.0],
        }


def test_s02_a_rank_whose_time_is_up_before_it_starts_counts_with_weight_0() -> None:
    outcomes = run_ranks(
        partial(one_step, x_WM=[[1.0, 2.0, 3.0, 6.0], [9.0, 9.0, 9.0, 9.0]], late_s=2.0)
    )

    assert outcomes == 2 * [[3.0, 1, 4.0, 8, False]]  # not 1.5


def test_s02_a_step_without_any_micro_batch_is_skipped_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Any]:
        model = Vector()
        tiny = ComputeBound(threshold_s=1e-9)
        with attach_through(
            make_exchange, model, plain_sgd(model), micro_batches=4, compute=tiny
        ) as job:
            for x in job.micro_batches(torch.ones(4, 1)):
                job.backward(model(x))
            report = job.step()
        return [model.w.item(), report.step, report.total_weight, report.skipped]

    with caplog.at_level(logging.WARNING):
        outcomes = run_ranks(work)

    assert outcomes == 2 * [[0.0, 1, 0.0, True]]
    assert [record.message[:15] for record in caplog.records] == ["step 1 skipped:"]


def windows(
    rank: int, make_exchange: MakeExchange, *, cut: int | None
) -> list[tuple[float, float, int]]:
    """S03: nine micro-batches with x = 3, M = 4; gradient, computed, planned."""
    hand = HandClock()
    model = Vector()
    seen = []
    with attach_through(
        make_exchange,
        model,
        plain_sgd(model),
        micro_batches=4,
        compute=ComputeBound(threshold_s=2.0),
        clock=hand.clock(),
    ) as job:
        for window, samples in enumerate((4, 4, 1)):
            before = model.w.item()
            for x in job.micro_batches(torch.full((samples, 1), 3.0)):
                job.backward(model(x))
                if window == cut:
                    hand.pass_s(1.0)
            report = job.step()
            seen.append((before - model.w.item(), report.computed, report.planned))
    return seen


def test_s03_a_short_last_window_is_divided_by_what_it_holds() -> None:
    (outcome,) = run_ranks(partial(windows, cut=None), num=1)

    assert outcome == [(3.0, 4, 4), (3.0, 4, 4), (3.0, 1, 1)]


def test_s03_so_is_a_window_that_the_threshold_cut() -> None:
    (outcome,) = run_ranks(partial(windows, cut=1), num=1)

    assert outcome == [(3.0, 4, 4), (3.0, 2, 4), (3.0, 1, 1)]


# Gradient per token = its value: means 4, 1 | 2, 8 with so many tokens.
TOKENS: dict[str, Any] = {
    "x_WM": [[4.0, 1.0], [2.0, 8.0]],
    "weight_WM": [[1.0, 3.0], [10.0, 2.0]],
}


@pytest.mark.parametrize(
    ("changes", "gradient"),
    [
        ({}, 43 / 16),  # not 3.75, the mean of means
        ({"slow_s": 1.5}, 27 / 14),
        ({"weight_WM": [[1.0, 3.0], [0.0, 0.0]]}, 7 / 4),
    ],
)
def test_s04_one_numerator_and_one_denominator_over_all_ranks(
    changes: dict[str, Any], gradient: float
) -> None:
    outcomes = run_ranks(partial(one_step, **(TOKENS | changes)))

    assert [outcome[0] for outcome in outcomes] == pytest.approx(2 * [gradient])


def test_s04_without_any_token_the_step_is_skipped() -> None:
    outcomes = run_ranks(
        partial(one_step, **(TOKENS | {"weight_WM": [[0.0, 0.0], [0.0, 0.0]]}))
    )

    assert [(outcome[0], outcome[4]) for outcome in outcomes] == 2 * [(0.0, True)]


def test_s05_waiting_for_a_slower_rank_is_not_compute() -> None:
    """Rank 0's last micro-batch takes 60 ms, all others 5 ms; three ranks wait."""

    def work(rank: int, make_exchange: MakeExchange) -> list[StepReport]:
        model = Vector()
        records: list[Record] = []
        with attach_through(
            make_exchange,
            model,
            plain_sgd(model),
            micro_batches=3,
            on_record=records.append,
        ) as job:
            for _ in range(5):
                for number, x in enumerate(job.micro_batches(torch.ones(3, 1))):
                    job.backward(model(x))
                    time.sleep(0.06 if rank == 0 and number == 2 else 0.005)
                job.step()
        return [record for record in records if isinstance(record, StepReport)]

    reports = run_ranks(work, num=3)

    last_s = [[step.latency_s[2] for step in rank[1:]] for rank in reports]
    assert min(last_s[0]) > 0.055
    # The slack is for a busy machine.
    assert sorted(last_s[1])[1] < 0.03
    assert sorted(last_s[2])[1] < 0.03
    # Who waits shows it in the exchange.
    assert max(step.exchange_s for step in reports[1][1:]) > 0.03


def test_s06_the_host_cannot_run_past_the_threshold() -> None:
    """Each micro-batch queues 50 ms of a device and returns at once; tau = 200 ms."""
    device = FakeDevice()
    bound = ComputeBound(threshold_s=0.2)
    budget = Budget(bound, num_micro_batches=8, rank=0, world_size=1)
    clock = EventClock(device.make_event, sleep=device.host.pass_s)
    accumulation = Accumulation([], clock, budget)

    for _ in accumulation.run(range(8), 8):
        device.queue(0.05)
    work = accumulation.finish()

    assert 3 <= work.computed <= 5
    assert work.latency_s == pytest.approx([0.05] * int(work.computed))


@pytest.mark.parametrize("drop", [False, True])
def test_a01_clipping_sees_the_reduced_gradient_once_a_step(drop: bool) -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Any]:
        hand = HandClock()
        model = Vector(2)
        optimizer = plain_sgd(model)
        norms: list[float] = []

        def clip(*_: Any) -> None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))

        optimizer.register_step_pre_hook(clip)
        with attach_through(
            make_exchange,
            model,
            optimizer,
            micro_batches=4,
            compute=ComputeBound(threshold_s=2.0),
            clock=hand.clock(),
        ) as job:
            for x in job.micro_batches(torch.tensor([[0.6, 0.8]]).repeat(4, 1)):
                job.backward(model(x))
                hand.pass_s(1.0 if drop and rank == 1 else 0.0)
            job.step()
        return [norms, (-model.w).tolist()]

    for norms, gradient in run_ranks(work):
        assert norms == pytest.approx([1.0])
        assert gradient == pytest.approx([0.6, 0.8])


def test_a05_an_error_in_one_ranks_micro_batch_ends_all() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = Vector()
        with attach_through(
            make_exchange, model, plain_sgd(model), micro_batches=4, compute=TAU
        ) as job:
            for number, x in enumerate(job.micro_batches(torch.ones(4, 1))):
                if rank == 1 and number == 1:
                    raise RuntimeError("out of memory")
                job.backward(model(x))
            job.step()

    first, second = run_ranks(work)

    assert isinstance(first, RemoteError)
    assert str(first) == "rank 1 ended the job: RuntimeError: out of memory"
    assert isinstance(second, RuntimeError)


def test_a05_a_rank_that_catches_it_joins_with_what_it_has() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Any]:
        model = Vector()
        seen: list[Any] = []
        with attach_through(
            make_exchange, model, plain_sgd(model), micro_batches=4, compute=TAU
        ) as job:
            for step in range(2):
                before = model.w.item()
                try:
                    for number, x in enumerate(job.micro_batches(torch.ones(4, 1))):
                        if rank == 1 and number == 1 and step == 0:
                            raise RuntimeError("out of memory")
                        job.backward(model(x * (1.0 + rank)))
                except RuntimeError:
                    pass
                report = job.step()
                seen.append((before - model.w.item(), report.total_computed))
        return seen

    # (4 x 1 + 1 x 2) / 5, then (4 x 1 + 4 x 2) / 8.
    for outcome in run_ranks(work):
        assert outcome == [(pytest.approx(1.2), 5.0), (pytest.approx(1.5), 8.0)]


def test_a11_several_steps_equal_a_single_process_sum() -> None:
    """M = 4, two dtypes and so two buckets, three steps, nobody calls zero_grad."""

    def build() -> nn.Module:
        rng = torch.Generator().manual_seed(3)
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).double()])
        for parameter in model.parameters():
            parameter.data = torch.randn(
                parameter.shape, generator=rng, dtype=parameter.dtype
            )
        return model

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model.children()
        loss: Tensor = first(x).square().mean() + second(x.double()).square().mean()
        return loss

    rng = torch.Generator().manual_seed(4)
    x_SWB3 = torch.randn(3, 2, 8, 3, generator=rng)

    def work(rank: int, make_exchange: MakeExchange) -> list[Tensor]:
        model = build()
        with attach_through(
            make_exchange, model, plain_sgd(model, 0.1), micro_batches=4, compute=TAU
        ) as job:
            for x_WB3 in x_SWB3:
                for x in job.micro_batches(x_WB3[rank]):
                    job.backward(loss_of(model, x))
                job.step()
        return [p.detach() for p in model.parameters()]

    outcomes = run_ranks(work)

    alone = build()
    optimizer = plain_sgd(alone, 0.1)
    for x_WB3 in x_SWB3:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(alone, x_WB3.reshape(16, 3)))
        optimizer.step()
    for parameters in outcomes:
        for ours, theirs in zip(parameters, alone.parameters(), strict=True):
            # float32 sums in another order.
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.processes
def test_a14_buffers_are_equal_though_a_rank_stopped_early_or_had_nothing() -> None:
    outcomes = [json.loads(output) for _, output, _ in finish(start_ranks("buffers"))]

    # After 1 of 4 micro-batches on rank 1, and after 0 of 4.
    assert outcomes[0] == outcomes[1]
    # Rank 0's own: four updates of 10 % towards its mean, 1, in each of two steps.
    assert outcomes[0] == [
        pytest.approx(1 - 0.9**4, rel=1e-5),
        pytest.approx(1 - 0.9**8, rel=1e-5),
    ]

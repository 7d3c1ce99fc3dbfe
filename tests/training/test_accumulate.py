"""One rank's micro-batches, on a clock that the tests move."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailbound.compute.budget import Budget
from tailbound.config import ComputeBound
from tailbound.errors import ConfigError
from tailbound.training.accumulate import Accumulation, Work, check_weight
from training.fakes import HandClock


class Wait(torch.autograd.Function):
    """Lets time pass on the way forward and on the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hand: HandClock, forward_s: float, backward_s: float
    ) -> Tensor:
        """Identity; ``forward_s`` passes."""
        ctx.hand, ctx.backward_s = hand, backward_s
        hand.pass_s(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Identity; ``backward_s`` passes."""
        ctx.hand.pass_s(ctx.backward_s)
        return grads[0], None, None, None


# torch has no types for these.
wait: Callable[[Tensor, HandClock, float, float], Tensor] = Wait.apply


class Slow(nn.Module):
    """A chain of weights that multiply x; each takes its time."""

    def __init__(
        self, hand: HandClock, num: int, forward_s: float, backward_s: float
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(())) for _ in range(num)
        )
        self.hand, self.forward_s, self.backward_s = hand, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """The product of x and the weights, one after the other."""
        for weight in self.weights:
            x = wait(x * weight, self.hand, self.forward_s, self.backward_s)
        return x


def make(
    model: nn.Module, hand: HandClock, bound: ComputeBound | None, num: int
) -> Accumulation:
    budget = None
    if bound is not None:
        budget = Budget(bound, num_micro_batches=num, rank=0, world_size=1)
    return Accumulation(list(model.parameters()), hand.clock(), budget)


def run(
    model: nn.Module,
    accumulation: Accumulation,
    inputs: list[float],
    weights: list[float] | None = None,
) -> Work:
    told = iter(weights or [1.0] * len(inputs))
    for x in accumulation.run([torch.tensor(x) for x in inputs], len(inputs)):
        accumulation.backward(model(x), next(told))
    return accumulation.finish()


def grads(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


MICRO_BATCH = ComputeBound(threshold_s=0.1)
KEEP = ComputeBound(threshold_s=0.09, preempt="backward")
DISCARD = ComputeBound(threshold_s=0.09, preempt="backward", partial="discard")


def test_without_a_bound_all_is_computed() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.25, 0.75)

    work = run(model, make(model, hand, None, 3), [1.0, 2.0, 4.0])

    assert grads(model) == [7.0]
    assert work == Work(
        weight=3.0,
        planned=3,
        computed=3,
        partial_share=0.0,
        latency_s=(1.0, 1.0, 1.0),
        overshoot_s=None,
        loss=7.0 / 3.0,
    )


def test_no_micro_batch_starts_at_the_threshold_or_after() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.01, 0.03)

    work = run(model, make(model, hand, MICRO_BATCH, 5), [1.0, 2.0, 4.0, 8.0, 16.0])

    assert grads(model) == [7.0]
    assert (work.weight, work.planned, work.computed) == (3.0, 5, 3)
    assert work.overshoot_s == pytest.approx(0.02)
    assert work.latency_s == pytest.approx((0.04, 0.04, 0.04))


@pytest.mark.parametrize(
    ("bound", "overshoot_s", "computed"),
    [
        # Five micro-batches end at 250 ms, the sixth at 300.
        (ComputeBound(threshold_s=0.275), 0.025, 6),
        # Forward until 265, then a gradient every 7 ms: 272, 279.
        (ComputeBound(threshold_s=0.275, preempt="backward"), 0.004, 5.4),
    ],
)
def test_backward_overshoots_by_less_than_a_quarter(
    bound: ComputeBound, overshoot_s: float, computed: float
) -> None:
    hand = HandClock()
    model = Slow(hand, 5, 0.003, 0.007)

    work = run(model, make(model, hand, bound, 12), [1.0] * 12)

    assert work.overshoot_s == pytest.approx(overshoot_s)
    assert work.computed == pytest.approx(computed)


def test_a_kept_part_counts_by_the_share_that_it_reached() -> None:
    hand = HandClock()
    # A micro-batch is 0.08 s, a gradient 0.02 s: at 0.1 s there is one of four.
    model = Slow(hand, 4, 0.0, 0.02)

    work = run(model, make(model, hand, KEEP, 2), [1.0, 5.0])

    # Declared: 1 + 1 / 4.
    assert (work.weight, work.computed, work.partial_share) == (1.25, 1.25, 0.25)
    # Received by the last: 2, sum 6; by the others: 1, sum 1. Times 1.25 / received.
    assert grads(model) == [1.25, 1.25, 1.25, 3.75]
    assert work.overshoot_s == pytest.approx(0.01)
    # Its latency is not known.
    assert work.latency_s == pytest.approx((0.08,))
    # Nor is its loss that of all samples: the mean is of the finished ones.
    assert work.loss == 1.0


def test_a_kept_part_of_another_weight() -> None:
    hand = HandClock()
    model = Slow(hand, 4, 0.0, 0.02)

    work = run(model, make(model, hand, KEEP, 2), [1.0, 5.0], weights=[2.0, 4.0])

    # Declared: 2 + 4 / 4 = 3. The last received 6, sum 2 + 20; the others 2, sum 2.
    assert (work.weight, work.computed) == (3.0, 1.25)
    assert grads(model) == [3.0, 3.0, 3.0, 11.0]


def test_a_discarded_part_leaves_no_trace() -> None:
    hand = HandClock()
    model = Slow(hand, 4, 0.0, 0.02)

    work = run(model, make(model, hand, DISCARD, 2), [1.0, 5.0])

    assert grads(model) == [1.0, 1.0, 1.0, 1.0]
    assert (work.weight, work.computed, work.partial_share) == (1.0, 1, 0.0)


def test_a_part_of_the_first_micro_batch_is_discarded() -> None:
    hand = HandClock()
    model = Slow(hand, 4, 0.0, 0.04)

    work = run(model, make(model, hand, KEEP, 2), [1.0, 5.0])

    assert grads(model) == [None] * 4
    assert (work.weight, work.computed, work.loss) == (0.0, 0, None)


def test_a_backward_that_would_start_too_late_does_not_start() -> None:
    hand = HandClock()
    model = Slow(hand, 2, 0.055, 0.0)

    work = run(model, make(model, hand, KEEP, 3), [1.0, 1.0, 1.0])

    assert (work.weight, work.computed, work.planned) == (0.0, 0, 3)
    assert work.overshoot_s == pytest.approx(0.02)


def test_whole_steps_are_bit_identical_in_both_modes() -> None:
    results = []
    for bound in (MICRO_BATCH, KEEP):
        hand = HandClock()
        rng = torch.Generator().manual_seed(1)
        model = nn.Linear(40, 30)
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng)
        accumulation = make(model, hand, bound, 7)
        for x in accumulation.run(torch.randn(7, 5, 40, generator=rng), 7):
            accumulation.backward(model(x).square().mean(), 3.0)
        assert accumulation.finish().computed == 7
        results.append([p.grad for p in model.parameters()])

    for first, second in zip(*results, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_the_next_step_starts_afresh() -> None:
    hand = HandClock()
    model = Slow(hand, 4, 0.0, 0.02)
    accumulation = make(model, hand, KEEP, 2)
    run(model, accumulation, [1.0, 5.0])
    accumulation.clear()
    for parameter in model.parameters():
        parameter.grad = None

    work = run(model, accumulation, [3.0])

    assert grads(model) == [3.0, 3.0, 3.0, 3.0]
    assert (work.weight, work.planned, work.computed) == (1.0, 1, 1)
    assert work.overshoot_s is None


def test_the_time_between_steps_is_not_compute() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.04)
    accumulation = make(model, hand, MICRO_BATCH, 2)
    run(model, accumulation, [1.0, 1.0])
    accumulation.clear()
    hand.pass_s(60.0)  # an exchange

    assert run(model, accumulation, [1.0, 1.0]).computed == 2


def test_what_is_dropped_stays_in_a_stream() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.04)
    accumulation = make(model, hand, MICRO_BATCH, 5)
    stream = iter([torch.tensor(float(x)) for x in range(1, 10)])

    for x in accumulation.run(stream, 5):
        accumulation.backward(model(x), 1.0)

    assert accumulation.finish().computed == 3
    assert next(stream).item() == 4.0


def test_the_end_of_a_stream_is_no_drop() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.01)
    accumulation = make(model, hand, MICRO_BATCH, 5)

    for x in accumulation.run(iter([torch.ones(()), torch.ones(())]), 5):
        accumulation.backward(model(x), 1.0)
    work = accumulation.finish()

    assert (work.planned, work.computed) == (2, 2)


def test_a_loop_of_the_callers_own_plans_what_it_computes() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 1.0)
    accumulation = make(model, hand, None, 1)

    for _ in range(3):
        accumulation.backward(model(torch.ones(())), 1.0)
    work = accumulation.finish()

    assert (work.planned, work.computed, work.latency_s) == (3, 3, ())


def test_a_break_after_a_micro_batch_counts_it() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.01)
    accumulation = make(model, hand, None, 4)

    for x in accumulation.run([torch.ones(())] * 4, 4):
        accumulation.backward(model(x), 1.0)
        break
    work = accumulation.finish()

    assert (work.planned, work.computed, work.weight) == (4, 1, 1.0)


class Broken(torch.autograd.Function):
    """Fails on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Identity."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Raises."""
        raise RuntimeError("out of memory")


break_backward: Callable[[Tensor], Tensor] = Broken.apply


@pytest.fixture(params=[None, MICRO_BATCH, KEEP])
def half_broken(
    request: pytest.FixtureRequest,
) -> tuple[nn.Module, Accumulation]:
    """One good micro-batch, and one that fails after its last weight's gradient."""
    hand = HandClock()
    model = Slow(hand, 2, 0.0, 0.001)
    accumulation = make(model, hand, request.param, 2)
    parts = accumulation.run([torch.ones(())] * 2, 2)
    accumulation.backward(model(next(parts)), 1.0)
    first, last = model.weights
    loss = break_backward(next(parts) * first) * last
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulation.backward(loss, 1.0)
    parts.close()  # as the end of the loop does
    return model, accumulation


def test_an_error_in_a_backward_leaves_nothing_half_done(
    half_broken: tuple[nn.Module, Accumulation],
) -> None:
    model, accumulation = half_broken

    work = accumulation.finish()

    if work.weight:  # it could be undone
        assert (work.weight, work.computed) == (1.0, 1)
        assert grads(model) == [1.0, 1.0]
    else:  # the whole step is given up
        assert (work.computed, work.planned) == (0.0, 2)


def test_a_micro_batch_of_weight_0_is_computed_and_leaves_no_gradient() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.01)

    work = run(model, make(model, hand, None, 2), [1.0, 1.0], weights=[0.0, 2.0])

    assert (work.weight, work.computed) == (2.0, 2)
    assert grads(model) == [2.0]


def test_a_loss_that_is_not_finite_is_not_told() -> None:
    hand = HandClock()
    model = Slow(hand, 1, 0.0, 0.01)

    assert run(model, make(model, hand, None, 1), [math.inf]).loss is None


def test_closing_takes_the_hooks_off() -> None:
    hand = HandClock()
    model = Slow(hand, 4, 0.0, 0.04)
    accumulation = make(model, hand, KEEP, 1)

    accumulation.close()
    run(model, accumulation, [1.0])

    assert grads(model) == [1.0] * 4


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_an_amount(weight: float) -> None:
    with pytest.raises(ConfigError, match="finite and >= 0"):
        check_weight(weight)

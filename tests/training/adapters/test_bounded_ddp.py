"""What adapters share: the share of a step that was computed, and its threshold.

In a process group of one rank the mean is the rank's own: a parameter's gradient shows
what was done to the denominator.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.training.adapters.bounded_ddp import BoundedDdp
from tailbound.training.clocks import CpuClock
from tailbound.training.hook import ddp_state
from training.ranks import Vector


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    """A module of one weight, w, whose loss is w * x."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield DistributedDataParallel(Vector())
    finally:
        dist.destroy_process_group()


def run(
    ddp: DistributedDataParallel,
    bounded: BoundedDdp,
    inputs: list[float],
    *,
    planned: int,
) -> float:
    """One step as a framework makes it: each loss over the planned number."""
    ddp.zero_grad()
    for turn, x in enumerate(inputs):
        ddp.require_backward_grad_sync = turn == len(inputs) - 1
        if bounded.is_over():
            continue
        bounded.count()
        torch.autograd.backward(ddp(torch.tensor([[x]])) * bounded.weight / planned)
    grad = ddp.module.w.grad
    assert isinstance(grad, torch.Tensor)
    return grad.item()


def test_a_short_window_is_divided_by_what_it_has(ddp: DistributedDataParallel) -> None:
    """S03: windows of 4, 4 and 1, and x = 3: the framework alone gives 0.75."""
    bounded = BoundedDdp(ddp, lambda: 4.0, ddp_state())

    grads = [run(ddp, bounded, num * [3.0], planned=4) for num in (4, 4, 1)]

    assert grads == [3.0, 3.0, 3.0]


def test_after_the_threshold_only_the_last_micro_batch_is_computed(
    ddp: DistributedDataParallel,
) -> None:
    """Of 3, 5, 7, 9 the third is left out at 2.0 s; in the next step none is."""
    now_s = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.5] + 2 * [7.0, 7.5, 7.5, 8.0, 8.0, 8.5])
    bounded = BoundedDdp(
        ddp,
        lambda: 4.0,
        ddp_state(),
        threshold_s=2.0,
        clock=CpuClock(lambda: next(now_s)),
    )

    first = run(ddp, bounded, [3.0, 5.0, 7.0, 9.0], planned=4)

    assert first == pytest.approx(17.0 / 3.0, rel=1e-6)
    assert (bounded.state.computed, bounded.state.planned) == (3, 4)
    assert run(ddp, bounded, [3.0, 5.0, 7.0, 9.0], planned=4) == 6.0
    assert (bounded.state.computed, bounded.state.planned) == (4, 4)


def test_micro_batches_count_by_their_weights(ddp: DistributedDataParallel) -> None:
    """S04's first rank alone: one token of 4, three of 1: 7 / 4."""
    bounded = BoundedDdp(ddp, lambda: 2.0, ddp_state())

    for turn, (x, tokens) in enumerate([(4.0, 1.0), (1.0, 3.0)]):
        ddp.require_backward_grad_sync = turn == 1
        bounded.weight = tokens
        bounded.count()
        torch.autograd.backward(ddp(torch.tensor([[x]])) * tokens / 2.0)

    assert ddp.module.w.grad.item() == 1.75


def test_a_backward_without_a_micro_batch_counts_whole(
    ddp: DistributedDataParallel,
) -> None:
    """Such as the second of two optimizers in one training step."""
    bounded = BoundedDdp(ddp, lambda: 4.0, ddp_state())

    run(ddp, bounded, 2 * [5.0], planned=4)
    ddp.zero_grad()
    torch.autograd.backward(ddp(torch.tensor([[3.0]])))

    assert ddp.module.w.grad.item() == 3.0
    assert (bounded.state.computed, bounded.state.planned) == (1, 1)


def test_a_step_of_weight_0_leaves_zeros(ddp: DistributedDataParallel) -> None:
    bounded = BoundedDdp(ddp, lambda: 1.0, ddp_state())
    bounded.weight = 0.0

    assert run(ddp, bounded, [3.0], planned=1) == 0.0
    assert bounded.state.weight == 0.0


def test_a_step_without_items_leaves_zeros(ddp: DistributedDataParallel) -> None:
    """The framework divides by none and gets NaN, which counts nowhere."""
    bounded = BoundedDdp(ddp, lambda: 0.0, ddp_state())
    bounded.weight = 0.0

    assert run(ddp, bounded, [math.nan], planned=1) == 0.0
    assert bounded.state.weight == 0.0


def test_a_micro_batch_that_no_reduction_took_is_forgotten_on_request(
    ddp: DistributedDataParallel,
) -> None:
    bounded = BoundedDdp(ddp, lambda: 1.0, ddp_state())
    bounded.count()
    bounded.begin()

    assert run(ddp, bounded, [3.0], planned=1) == 3.0


def test_a_second_hook_is_refused_with_what_to_do(ddp: DistributedDataParallel) -> None:
    BoundedDdp(ddp, lambda: 1.0, ddp_state())

    with pytest.raises(ConfigError, match="has a communication hook already: bind it"):
        BoundedDdp(ddp, lambda: 1.0, ddp_state())


def test_a_state_that_is_none_is_refused(ddp: DistributedDataParallel) -> None:
    with pytest.raises(ConfigError, match=r"state is made by tailbound\.ddp_state\(\)"):
        BoundedDdp(ddp, lambda: 1.0, ddp_state)  # type: ignore[arg-type]


def test_a_model_outside_ddp_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="the model is Linear and not Distributed"):
        BoundedDdp(nn.Linear(1, 1), lambda: 1.0, ddp_state())


@pytest.mark.parametrize("threshold_s", [0.0, -1.0, float("nan")])
def test_a_threshold_that_is_no_time_is_refused(
    ddp: DistributedDataParallel, threshold_s: float
) -> None:
    with pytest.raises(ConfigError, match="threshold_s is None or a positive time"):
        BoundedDdp(ddp, lambda: 1.0, ddp_state(), threshold_s=threshold_s)

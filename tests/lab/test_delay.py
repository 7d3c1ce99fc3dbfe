"""The delay: how long a micro-batch takes, where it waits, and what it leaves alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tailbound.lab.delay import Delay
from tailbound.lab.models import CharGPT, digits_cnn, resnet

EPS = (0.30364, 0.40885, 0.23055, 0.12446, 0.19247, 0.1125)
"""min(exp(4 + z) / (2 exp(4.5)), 5.5), z: the first normals of default_rng([7, 0])."""
OTHER_EPS = (0.42922, 0.02928, 0.2161)
"""The same of default_rng([7, 1])."""


@dataclass
class Clock:
    """Time that passes while somebody sleeps, and when a test says so."""

    now_s: float = 100.0
    slept_s: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def take_slept(self) -> list[float]:
        slept_s, self.slept_s = self.slept_s, []
        return slept_s


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def delayed(
    model: nn.Module, clock: Clock, *, rank: int = 0, base_s: float = 1.0
) -> Delay:
    """Three micro-batches a step."""
    return Delay(
        model,
        base_s=base_s,
        micro_batches=3,
        rng=np.random.default_rng([7, rank]),
        now=clock.now,
        sleep=clock.sleep,
    )


def last_weight(model: nn.Sequential) -> nn.Parameter:
    weight = model[-1].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def compute(model: nn.Module, num: int = 1) -> None:
    for _ in range(num):
        model(torch.ones(1, 2)).sum().backward()


def test_a_micro_batch_takes_mu_and_eps_of_it() -> None:
    clock, model = Clock(), two_layers()
    delay = delayed(model, clock, base_s=0.004)
    lengths_s = []

    for _ in range(2):
        delay.begin_step()
        for _ in range(3):
            begun_s = clock.now_s
            compute(model)
            lengths_s.append(clock.now_s - begun_s)

    assert lengths_s == pytest.approx([0.004 * (1.0 + eps) for eps in EPS], abs=1e-7)


def test_a_third_is_waited_for_in_the_forward_and_layers_share_equally() -> None:
    """1.30364 s: a sixth of it in each forward, a third in each backward."""
    clock, model = Clock(), two_layers()
    delayed(model, clock).begin_step()

    loss = model(torch.ones(1, 2)).sum()
    assert clock.take_slept() == pytest.approx([0.217273, 0.217273], abs=1e-5)

    loss.backward()
    assert clock.take_slept() == pytest.approx([0.434547, 0.434547], abs=1e-5)


def test_a_layers_gradient_is_there_after_its_wait() -> None:
    """Two thirds of 1.30364 s before the last layer's, all before the first's."""
    clock, model = Clock(now_s=0.0), two_layers()
    delayed(model, clock).begin_step()
    arrived_s: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: arrived_s.append(clock.now_s)
        )

    compute(model)

    assert arrived_s == pytest.approx([0.869093] * 2 + [1.30364] * 2, abs=1e-5)


class Busy(nn.Module):
    """A layer whose own forward takes a while."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now_s += self.seconds
        return x * self.weight


@pytest.mark.parametrize(
    ("seconds", "slept_s"),
    [
        (0.1, [0.434547, 0.769093]),  # 1.30364 / 3, then 2 / 3 without the 0.1
        (2.0, [0.434547]),  # its time was over
    ],
)
def test_the_models_own_compute_is_part_of_the_time(
    seconds: float, slept_s: list[float]
) -> None:
    clock = Clock()
    model = Busy(clock, seconds)
    delayed(model, clock).begin_step()

    compute(model)

    assert clock.slept_s == pytest.approx(slept_s, abs=1e-5)


def test_what_lies_between_two_micro_batches_is_part_of_the_time() -> None:
    clock, model = Clock(now_s=0.0), two_layers()
    delayed(model, clock).begin_step()

    compute(model)
    clock.now_s += 0.1
    compute(model)

    assert clock.now_s == pytest.approx(2.0 + EPS[0] + EPS[1], abs=1e-5)


def test_a_step_after_a_backward_that_was_left_takes_its_whole_time() -> None:
    clock, model = Clock(now_s=0.0), two_layers()
    delay = delayed(model, clock)

    def leave(_: Tensor) -> None:
        raise KeyboardInterrupt

    delay.begin_step()
    handle = last_weight(model).register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyboardInterrupt):
        compute(model)
    handle.remove()
    left_s = clock.now_s
    delay.begin_step()
    compute(model)

    assert left_s == pytest.approx(0.869093, abs=1e-5)
    assert clock.now_s - left_s == pytest.approx(1.0 + EPS[3], abs=1e-5)


def test_micro_batches_that_are_dropped_change_no_later_delay() -> None:
    clock, model = Clock(now_s=0.0), two_layers()
    delay = delayed(model, clock)

    delay.begin_step()
    compute(model)
    delay.begin_step()
    begun_s = clock.now_s
    compute(model)

    assert clock.now_s - begun_s == pytest.approx(1.0 + EPS[3], abs=1e-5)


def test_each_rank_has_delays_of_its_own() -> None:
    clock, model = Clock(now_s=0.0), two_layers()
    delayed(model, clock, rank=1).begin_step()

    compute(model, 3)

    assert clock.now_s == pytest.approx(3.0 + sum(OTHER_EPS), abs=1e-4)


def test_an_evaluation_does_not_wait() -> None:
    clock, model = Clock(), two_layers()
    delay = delayed(model, clock)

    delay.begin_step()
    compute(model)
    clock.take_slept()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 2))

    assert clock.slept_s == []


def test_a_model_is_as_fast_as_before_once_the_hooks_are_off() -> None:
    clock, model = Clock(), two_layers()
    delay = delayed(model, clock)

    delay.begin_step()
    delay.remove()
    compute(model)

    assert clock.slept_s == []


@pytest.mark.parametrize(
    ("make_model", "inputs", "num_layers"),
    [
        (digits_cnn, torch.ones(2, 1, 8, 8), 6),
        (
            lambda: resnet(dims=1, in_channels=1, widths=(8, 16), blocks_per_width=1),
            torch.ones(2, 1, 40),
            # The first convolution and norm, two blocks of four, a shortcut, the last.
            12,
        ),
        # Embedding, two blocks of six, the last norm, and the model's own position.
        (lambda: CharGPT(context=8), torch.ones(2, 8, dtype=torch.int64), 15),
    ],
)
def test_it_waits_in_every_layer_of_a_tasks_model_and_changes_no_bit(
    make_model: Callable[[], nn.Module], inputs: Tensor, num_layers: int
) -> None:
    clock, model = Clock(), make_model()
    gradients = []

    for is_slow in (False, True):
        if is_slow:
            delayed(model, clock).begin_step()
        model.zero_grad()
        model(inputs).square().sum().backward()
        gradients.append(
            [one.grad for one in model.parameters() if one.grad is not None]
        )

    assert len(clock.slept_s) == 2 * num_layers
    assert all(map(torch.equal, *gradients))
    assert sum(clock.slept_s) == pytest.approx(1.0 + EPS[0], abs=1e-5)

"""Slow workers on purpose: the paper's delay model, waited for inside the layers.

A micro-batch takes mu * (1 + eps), a third of it in the forward and the rest in the
backward, in equal parts for every layer that has parameters. The waiting is real and
what this machine computes is part of it: a layer waits until its part of the time is
over, one micro-batch's time begins where that of the one before ends, and mu is to be
longer than a micro-batch takes without the delay.

Source: DropCompute, appendix:runtime_performace, "Simulated delay"; spec C5.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tailbound.compute.noise import DelayModel

FORWARD_SHARE = 1 / 3
"""A layer's backward makes two products, of its input's and of its weight's gradient,
where the forward makes one."""


class Delay:
    """Lets every micro-batch of a model in training mode take longer.

    Args:
        model: waits in those of its modules that have parameters of their own.
        base_s: of a micro-batch without delay (mu), in seconds, > 0.
        micro_batches: of a step (M).
        rng: one for each rank; which micro-batches are computed changes no delay.
        now: reads a clock, in seconds.
        sleep: waits the given seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        base_s: float,
        micro_batches: int,
        rng: np.random.Generator,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._noise, self._base_s = DelayModel(base_s), base_s
        self._micro_batches, self._rng = micro_batches, rng
        self._now, self._sleep = now, sleep
        self._begin_s = 0.0
        """When the next micro-batch begins: where the one before ends."""
        self._delays_s: deque[float] = deque()
        self._end_s: deque[float] = deque()
        """When the parts of this micro-batch that are still to come are over."""
        layers = [
            module
            for module in model.modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        back = 1.0 - FORWARD_SHARE
        num = len(layers)
        forward = (FORWARD_SHARE * part / num for part in range(1, num + 1))
        backward = (FORWARD_SHARE + back * part / num for part in range(1, num + 1))
        self._shares = tuple(chain(forward, backward))
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin_micro_batch)
        ]
        for layer in layers:
            self._handles += [
                layer.register_forward_pre_hook(self._wait_forward),
                layer.register_forward_hook(self._await_backward),
            ]

    def begin_step(self) -> None:
        """Draw the delays of a step's micro-batches; the first of them begins now."""
        self._begin_s = self._now()
        delays_s = self._noise.sample(self._rng, self._micro_batches)
        self._delays_s = deque(delays_s.tolist())

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _begin_micro_batch(self, model: nn.Module, inputs: Any) -> None:
        if model.training:
            begin_s, whole_s = self._begin_s, self._base_s + self._delays_s.popleft()
            self._end_s = deque(begin_s + share * whole_s for share in self._shares)
            self._begin_s += whole_s

    def _wait_forward(self, layer: nn.Module, inputs: Any) -> None:
        if layer.training:
            self._wait()

    def _await_backward(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        """Wait when the gradient of the output is there, and the layer's is not."""
        if layer.training:
            output.register_hook(lambda _: self._wait())  # type: ignore[no-untyped-call]

    def _wait(self) -> None:
        rest_s = self._end_s.popleft() - self._now()
        if rest_s > 0.0:
            self._sleep(rest_s)

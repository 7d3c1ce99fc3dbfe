"""One step's gradients on this rank: micro-batches until the threshold, and weights.

``preempt="micro_batch"`` looks at the clock between micro-batches; gradients add up in
``parameter.grad`` as usual. ``preempt="backward"`` also looks when a parameter has got
its gradient, and leaves the running backward by an exception of its own. Then each
micro-batch's gradients are kept apart until it is over, at no extra cost (autograd
hands over the first gradient without a copy, and the sum is made here instead of
there), so that those of an unfinished one can be kept or discarded exactly.
Source: DropCompute, Algorithm 1; spec C1, C2; docs/design/0019.
"""

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tailbound.compute.budget import Budget
from tailbound.errors import ConfigError
from tailbound.training.clocks import ComputeClock


class _ThresholdReached(BaseException):
    """Leaves a backward from a gradient hook.

    Not an Exception: a handler in a user's autograd function must not swallow it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank did in a step."""

    weight: float
    """Behind the accumulated gradient."""
    planned: int
    computed: float
    """Micro-batches in the gradient; the part of an unfinished one included."""
    partial_share: float
    latency_s: tuple[float, ...]
    overshoot_s: float | None
    """Stopped this long after the threshold; None: it was not cut."""
    loss: float | None
    """Weighted mean of the losses told; None: there was none, or it was not finite."""


class Accumulation:
    """Accumulates micro-batches, step after step.

    Args:
        parameters: those that get gradients.
        clock: measures the compute.
        budget: says when it is enough, and how to stop; None: never.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        clock: ComputeClock,
        budget: Budget | None,
    ) -> None:
        self._parameters, self._clock, self._budget = parameters, clock, budget
        self._preempts = budget is not None and budget.bound.preempt == "backward"
        self._keeps = budget is not None and budget.bound.partial == "keep"
        self._handles = []
        if self._preempts:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._on_grad
                )
                for parameter in parameters
            ]
        self._in_backward = False
        self._reset()

    def _reset(self) -> None:
        self._weight = 0.0
        self._planned = self._finished = 0
        self._backwards = 0
        self._is_timed = False
        self._is_spoiled = False
        self._left_share: float | None = None
        self._left_weight = 0.0
        self._reached: list[bool] = []
        self._stopped_s: float | None = None
        self._losses: list[Tensor] = []
        self._loss_weights: list[float] = []

    def run(self, parts: Iterable[Any], planned: int) -> Generator[Any, None, None]:
        """Give micro-batches until there are no more or the threshold is reached.

        Args:
            parts: the micro-batches; none is taken that is not given.
            planned: how many there are to be.
        """
        if not self._is_timed:
            self._is_timed = True
            self._clock.begin()
        self._planned += planned
        source = iter(parts)
        for _ in range(planned):
            if self._is_over():
                return
            try:
                part = next(source)
            except StopIteration:
                # The end of a stream is no drop.
                self._planned = self._finished
                return
            weight = self._weight
            try:
                yield part
            except GeneratorExit:
                # The caller left its loop: by break, or by an error in its body.
                if self._weight > weight:
                    self._end_micro_batch()
                raise
            self._end_micro_batch()

    def _end_micro_batch(self) -> None:
        if self._left_share is None:
            self._clock.mark()
            self._finished += 1

    def _is_over(self) -> bool:
        """Look at the clock; note when it is enough."""
        if self._budget is None or not self._is_timed:
            return False
        if self._left_share is not None:
            return True
        elapsed_s = self._clock.elapsed_s()
        if not self._budget.is_over(elapsed_s):
            return False
        self._stopped_s = elapsed_s
        return True

    def backward(self, loss: Tensor, weight: float) -> None:
        """Accumulate one gradient; see ``Job.backward``."""
        self._backwards += 1
        if weight == 0.0 or self._left_share is not None:
            return
        scaled = loss if weight == 1.0 else loss * weight
        if self._preempts:
            is_whole = self._backward_apart(scaled, weight)
        else:
            try:
                torch.autograd.backward(scaled)
            except BaseException:
                # Some parameters have this gradient and some do not.
                self._is_spoiled = True
                raise
            is_whole = True
        if is_whole:
            self._weight += weight
            # Stays on its device: asking for its value would wait for it. Arithmetic
            # on scalars would cost more than all else here; it waits for the step.
            self._losses.append(loss.detach())
            self._loss_weights.append(weight)

    def declare(self, weight: float) -> None:
        """Count what the caller accumulated itself; see ``Job.declare``."""
        self._weight += weight

    def _backward_apart(self, scaled: Tensor, weight: float) -> bool:
        """Run a backward that may be left; True if it was not."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        is_whole = False
        reached: list[bool] = []
        try:
            self._in_backward = True
            if not self._is_over():
                torch.autograd.backward(scaled)
                is_whole = True
        except _ThresholdReached:
            reached = [parameter.grad is not None for parameter in self._parameters]
        except BaseException:
            self._put_back(before)
            raise
        finally:
            self._in_backward = False
        if is_whole:
            self._add(before)
        elif self._keeps and self._weight > 0.0 and any(reached):
            self._add(before)
            self._leave(reached, weight)
        else:
            self._put_back(before)
            self._left_share = 0.0
        return is_whole

    def _on_grad(self, parameter: Tensor) -> None:
        if self._in_backward and self._is_over():
            raise _ThresholdReached

    def _add(self, before: list[Tensor | None]) -> None:
        """Add what came before to this micro-batch's gradients, in autograd's order."""
        for parameter, old in zip(self._parameters, before, strict=True):
            if old is not None:
                if parameter.grad is not None:
                    old.add_(parameter.grad)
                parameter.grad = old

    def _put_back(self, before: list[Tensor | None]) -> None:
        for parameter, old in zip(self._parameters, before, strict=True):
            parameter.grad = old

    def _leave(self, reached: list[bool], weight: float) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        got = sum(n for n, is_in in zip(sizes, reached, strict=True) if is_in)
        self._left_share = got / sum(sizes)
        self._left_weight, self._reached = weight, reached

    def finish(self) -> Work:
        """End the step's compute: normalise what an unfinished micro-batch left.

        A parameter that received weight w_p, where the rank as a whole declares w, is
        multiplied by w / w_p: its mean is over what it received, and counts with the
        weight that the rank declares.
        """
        share = self._left_share or 0.0
        weight = self._weight + share * self._left_weight
        if share:
            for parameter, is_in in zip(self._parameters, self._reached, strict=True):
                received = self._weight + (self._left_weight if is_in else 0.0)
                if parameter.grad is not None:
                    parameter.grad.mul_(weight / received)
        computed = self._finished + share
        planned = self._planned
        if not self._is_timed:  # the caller has a loop of its own
            computed = planned = self._backwards
        if self._is_spoiled:
            weight, computed = 0.0, 0.0
        overshoot_s = None
        threshold_s = None if self._budget is None else self._budget.threshold_s
        if self._stopped_s is not None and threshold_s is not None:
            overshoot_s = self._stopped_s - threshold_s
        return Work(
            weight=weight,
            planned=planned,
            computed=computed,
            partial_share=share,
            latency_s=self._clock.latency_s() if self._is_timed else (),
            overshoot_s=overshoot_s,
            loss=self._mean_loss(),
        )

    def clear(self) -> None:
        """Forget the step that was exchanged."""
        self._reset()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _mean_loss(self) -> float | None:
        if not self._losses:
            return None
        told = torch.stack([loss.double() for loss in self._losses]).tolist()
        pairs = zip(told, self._loss_weights, strict=True)
        mean = sum(loss * weight for loss, weight in pairs) / sum(self._loss_weights)
        return mean if math.isfinite(mean) else None


def check_weight(weight: float) -> None:
    """Raise ConfigError unless this can be a micro-batch's weight."""
    if not 0.0 <= weight < math.inf:
        raise ConfigError(f"a weight is finite and >= 0, not {weight}")

"""Hugging Face: Trainer and Accelerate with bounded gradients.

    class BoundedTrainer(BoundedReduction, Trainer): ...

    model = accelerator.prepare(model)
    bounded = bound(accelerator, model, tailbound.ddp_state())

Imports neither library: the classes meet in the user's script.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tailbound.errors import ConfigError
from tailbound.training.adapters.bounded_ddp import BoundedDdp, check_options
from tailbound.training.clocks import ComputeClock
from tailbound.training.hook import DdpState, ddp_state
from tailbound.training.leaving import describe


class BoundedReduction:
    """A mixin for ``transformers.Trainer`` and its children; name it first.

    The Trainer counts the items (tokens with a label) of a step's micro-batches over
    all ranks and divides by them before any of them has run. When a threshold drops
    some, the mean is taken over the items that were computed.

    Args:
        args: the Trainer's.
        state: made by ``tailbound.ddp_state``; None: with its defaults.
        threshold_s: seconds of compute after which a rank leaves out the rest of a
            step's micro-batches, but for the last one. None: none.
        clock: measures the compute; None: the one for the model's device.
        kwargs: the Trainer's.

    Raises:
        ConfigError: the state is none, the threshold is no time, the Trainer wraps the
            model in something else than DDP, or it reduces in each micro-batch.
    """

    def __init__(
        self,
        *args: Any,
        state: DdpState | None = None,
        threshold_s: float | None = None,
        clock: ComputeClock | None = None,
        **kwargs: Any,
    ) -> None:
        self.bounded_state = ddp_state() if state is None else state
        """For ``last_step``, ``error`` and ``close``."""
        check_options(self.bounded_state, threshold_s)
        self._threshold_s, self._clock = threshold_s, clock
        self._bounded: BoundedDdp | None = None
        super().__init__(*args, **kwargs)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train; an error is told to the other ranks.

        Raises:
            TailboundError: the exchange failed; not DDP's RuntimeError about it.
        """
        state: DdpState = self.bounded_state
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            failure = state.error if isinstance(error, RuntimeError) else None
            state.abort(describe(failure or error))
            if failure is not None:
                raise failure from error
            raise

    def training_step(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute one micro-batch, or leave it out."""
        compute = super().training_step  # type: ignore[misc]
        if self.args.world_size == 1:
            return compute(model, inputs, num_items_in_batch)
        bounded = self._bounded
        if bounded is None or bounded.ddp is not model:
            _check_sync(self.accelerator)
            bounded = self._bounded = BoundedDdp(
                model,
                lambda: float(self._planned),
                self.bounded_state,
                threshold_s=self._threshold_s,
                clock=self._clock,
            )
        if bounded.is_over():
            return torch.zeros((), device=self.args.device)
        self._planned, bounded.weight = self._weigh(inputs, num_items_in_batch)
        bounded.count()
        return compute(model, inputs, num_items_in_batch)

    def _weigh(
        self: Any, inputs: dict[str, Any], num_items: Any
    ) -> tuple[float, float]:
        """What the losses are divided by, and this micro-batch's part of it."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:  # the Trainer's own rule
            is_scaled = (
                self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            )
        if num_items is None or not is_scaled or self._threshold_s is None:
            return self.current_gradient_accumulation_steps, 1.0
        items = float(num_items)
        if self.args.average_tokens_across_devices:
            items /= self.args.world_size  # the loss is multiplied by it
        return items, self._count_items(inputs)

    def _count_items(self: Any, inputs: dict[str, Any]) -> float:
        """Items of one micro-batch, by the Trainer's own rule but on this rank only."""
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            _, items = self.get_batch_samples(iter([inputs]), 1, self.args.device)
        finally:
            self.args.average_tokens_across_devices = averages
        return float(items)


class BoundedAccelerator:
    """What ``bound`` returns: the hook on a prepared module."""

    def __init__(self, bounded: BoundedDdp | None, state: DdpState) -> None:
        self.state = state
        """For ``last_step``, ``error`` and ``close``."""
        self._bounded = bounded

    @property
    def weight(self) -> float:
        """Behind the next micro-batch, whose loss you multiply by what you read here.

        In a job of one rank, where nothing is divided by it again, it stays 1.
        """
        return 1.0 if self._bounded is None else self._bounded.weight

    @weight.setter
    def weight(self, value: float) -> None:
        if self._bounded is not None:
            self._bounded.weight = value

    def is_over(self) -> bool:
        """True if the threshold has passed: leave this micro-batch out."""
        return self._bounded is not None and self._bounded.is_over()


def bound(
    accelerator: Any,
    model: nn.Module,
    state: DdpState,
    *,
    threshold_s: float | None = None,
    clock: ComputeClock | None = None,
) -> BoundedAccelerator:
    """Bound the gradients of a module that ``accelerator.prepare`` returned.

    ``accelerator.backward`` divides by ``gradient_accumulation_steps`` even where the
    data end earlier; the mean is taken over the micro-batches that went through it.

    Args:
        accelerator: that prepared it.
        model: the prepared module, wrapped in DDP; a job of one rank needs no wrapping.
        state: made by ``tailbound.ddp_state``.
        threshold_s: seconds of compute after which ``is_over()`` is True inside
            ``accelerator.accumulate(model)``, but for a step's last micro-batch.
        clock: measures the compute; None: the one for the model's device.

    Raises:
        ConfigError: the model is no DDP module or bound already, the state is none, the
            threshold is no time, or Accelerate reduces in each micro-batch.
    """
    check_options(state, threshold_s)
    if accelerator.num_processes == 1:
        return BoundedAccelerator(None, state)
    _check_sync(accelerator)
    bounded = BoundedDdp(
        model,
        lambda: float(accelerator.gradient_accumulation_steps),
        state,
        threshold_s=threshold_s,
        clock=clock,
    )

    backward = accelerator.backward
    is_forwarded = False

    def on_forward(module: nn.Module, inputs: Any) -> None:
        nonlocal is_forwarded
        is_forwarded |= module.training and torch.is_grad_enabled()

    def counted(loss: Tensor, **kwargs: Any) -> None:
        # A micro-batch may run the model twice; a backward may be another model's.
        nonlocal is_forwarded
        if is_forwarded:
            is_forwarded = False
            if accelerator.gradient_accumulation_steps == 1:
                bounded.begin()  # whoever accumulates without Accelerate divides too
            bounded.count()
        backward(loss, **kwargs)

    model.register_forward_pre_hook(on_forward)
    accelerator.backward = counted
    return BoundedAccelerator(bounded, state)


def _check_sync(accelerator: Any) -> None:
    """Refuse to reduce a gradient that is going to be added to.

    Raises:
        ConfigError: Accelerate reduces in each micro-batch.
    """
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise ConfigError(
            "sync_each_batch reduces before a step's gradient is whole, and its mean "
            "would be taken again: leave it off"
        )


__all__ = ["BoundedAccelerator", "BoundedReduction", "bound"]

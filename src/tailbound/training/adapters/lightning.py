"""PyTorch Lightning: a callback that bounds DDP's gradients, on any device.

    trainer = Trainer(strategy="ddp", callbacks=[BoundedAllreduce(ddp_state())])

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers a hook on CUDA only, and
divides the last window of an epoch by micro-batches that it does not have.
"""

from typing import Any

import torch

from tailbound.errors import ConfigError, MissingExtraError
from tailbound.training.adapters.bounded_ddp import BoundedDdp, check_options
from tailbound.training.clocks import ComputeClock
from tailbound.training.hook import DdpState
from tailbound.training.leaving import describe

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError(
            "this adapter needs Lightning: pip install 'tailbound[adapters]'"
        ) from error


class BoundedAllreduce(Callback):
    """Registers the hook when training starts; goes into checkpoints.

    Args:
        state: made by ``tailbound.ddp_state``.
        threshold_s: seconds of compute after which a rank leaves out the rest of its
            ``accumulate_grad_batches`` micro-batches, but for the last one. None: none.
        clock: measures the compute; None: the one for the module's device.

    Raises:
        ConfigError: the state is none, or the threshold is no time.
    """

    def __init__(
        self,
        state: DdpState,
        *,
        threshold_s: float | None = None,
        clock: ComputeClock | None = None,
    ) -> None:
        check_options(state, threshold_s)
        self.state = state
        """For ``last_step``, ``error`` and ``close``."""
        self.bounded: BoundedDdp | None = None
        """While training with several ranks; its ``weight`` is the next batch's."""
        self._threshold_s, self._clock = threshold_s, clock

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook on the module that the strategy has wrapped."""
        if trainer.world_size == 1:
            return
        if self._threshold_s is not None and not pl_module.automatic_optimization:
            raise ConfigError(
                "threshold_s drops micro-batches of Lightning's own loop: leave "
                "automatic_optimization on, or give no threshold"
            )

        def planned() -> float:
            is_ours = pl_module.automatic_optimization
            return float(trainer.accumulate_grad_batches) if is_ours else 1.0

        self.bounded = BoundedDdp(
            trainer.strategy.model,
            planned,
            self.state,
            threshold_s=self._threshold_s,
            clock=self._clock,
        )
        pl_module.training_step = _watch(pl_module, self.bounded)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module its own training_step back."""
        self._forget(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Tell the other ranks what went wrong."""
        self.state.abort(describe(exception))
        self._forget(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What goes into Lightning's checkpoint."""
        return self.state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from Lightning's checkpoint, with any number of ranks."""
        self.state.load_state_dict(state_dict)

    def _forget(self, pl_module: Any) -> None:
        if self.bounded is not None:
            self.bounded = None
            del pl_module.training_step


def _watch(module: Any, bounded: BoundedDdp) -> Any:
    """The module's training_step, counted, and left out after the threshold."""
    step = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if bounded.is_over():
            # Lightning refuses None with several ranks. Nothing hangs on this loss.
            device = next(module.parameters()).device
            return torch.zeros((), device=device, requires_grad=True)
        if not module.automatic_optimization:
            bounded.begin()  # the module divides what it accumulates by itself
        bounded.count()
        return step(*args, **kwargs)

    return training_step

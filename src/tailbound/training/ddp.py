"""A model in DistributedDataParallel: its own reduction is held back while attached.

DDP reduces during the last backward of a step, which nobody knows when a threshold
may end the step at any time; a rank that never runs it would leave the others waiting.
So DDP stays in ``no_sync`` and the job makes the one exchange of each step.
"""

from contextlib import ExitStack

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.training.buckets import buffer_bytes, load_buffer_bytes
from tailbound.training.exchange import AllGather


class HeldDdp:
    """A DDP module whose reduction rests; ``release`` gives it back.

    Args:
        ddp: the user's module.

    Raises:
        ConfigError: it was built in a way that reduces all the same.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if ddp.static_graph:
            raise ConfigError(
                "DDP(static_graph=True) reduces after a backward of its own choice; "
                "build it without, tailbound needs no static graph"
            )
        self._ddp = ddp
        self._stack = ExitStack()
        self._stack.enter_context(ddp.no_sync())
        # Else the first forward would broadcast buffers, on those ranks that run one.
        self._stack.callback(setattr, ddp, "require_forward_param_sync", True)
        ddp.require_forward_param_sync = False
        self._has_buffers = ddp.broadcast_buffers and any(
            True for _ in ddp.module.buffers()
        )

    def share_buffers(self, all_gather: AllGather, rank: int) -> None:
        """Set all buffers to rank 0's, as DDP's own forward would.

        Args:
            all_gather: exchanges bytes with all ranks; they all call this.
            rank: this process.
        """
        if self._has_buffers:
            module = self._ddp.module
            mine = buffer_bytes(module) if rank == 0 else b""
            told = all_gather(mine)[0]
            if rank != 0:
                load_buffer_bytes(module, told)

    def release(self) -> None:
        """Let DDP reduce again. Releasing twice is fine."""
        self._stack.close()


def unwrap(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module that holds the parameters, and the DDP around it if there is one.

    Raises:
        ConfigError: DDP is somewhere inside the model.
    """
    inner, ddp = model, None
    if isinstance(model, DistributedDataParallel):
        inner, ddp = model.module, model
    if any(isinstance(module, DistributedDataParallel) for module in inner.modules()):
        raise ConfigError(
            "a part of the model is wrapped in DDP, which reduces it on its own; wrap "
            "the whole model or nothing"
        )
    return inner, ddp

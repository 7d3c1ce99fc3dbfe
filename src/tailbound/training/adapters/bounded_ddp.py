"""A framework's DDP module: its gradients are bounded, its denominators right.

A framework divides each micro-batch's loss by the number that it planned for the
optimizer step, before it knows how many there will be. The last window of an epoch may
be shorter, and a threshold may drop some. A rank whose gradient holds d of M planned
micro-batches has the sum of d losses' gradients over M; counted with the weight d / M
and not multiplied by it, the mean over the ranks is

    sum_W (sum of d_w gradients / M)  /  sum_W (d_w / M)

which is the mean over all micro-batches that were computed (docs/design/0010).
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.training.clocks import ComputeClock, make_clock
from tailbound.training.hook import DdpState, bounded_allreduce


class BoundedDdp:
    """The hook on one DDP module, and the micro-batches of the running step.

    Args:
        ddp: made by the framework; it must have no other communication hook.
        planned: what the framework divides the losses of a step by, asked at its end.
        state: of the hook.
        threshold_s: seconds of compute after which a step's micro-batches are dropped.
            The last one is always computed, since DDP reduces in its backward, and so
            is the first. None: no threshold.
        clock: measures the compute; None: the one for the module's device.

    Raises:
        ConfigError: it is no DDP module, or the threshold is no time.
    """

    weight: float
    """Behind the next micro-batch, whose loss the caller multiplied by it: samples or
    tokens. 1: all count alike."""

    def __init__(
        self,
        ddp: nn.Module,
        planned: Callable[[], float],
        state: DdpState,
        *,
        threshold_s: float | None = None,
        clock: ComputeClock | None = None,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"the model is {type(ddp).__name__} and not DistributedDataParallel: "
                "let the framework use its DDP strategy, or see "
                "tailbound.training.adapters.fsdp for a sharded model"
            )
        check_threshold(threshold_s)
        self.ddp, self.state, self.weight = ddp, state, 1.0
        self._planned, self._threshold_s = planned, threshold_s
        self._clock = clock or make_clock(next(ddp.parameters()).device)
        self._is_timed = False
        self._done: float | None = None
        self._share = 1.0
        ddp.register_comm_hook(self, _reduce_bucket)

    def is_over(self) -> bool:
        """True if the micro-batch to come is dropped: do not compute it.

        The first question of a step starts its clock.
        """
        if self._threshold_s is None:
            return False
        if not self._is_timed:
            self._is_timed = True
            self._clock.begin()
            return False
        self._clock.mark()
        # DDP's own word for "the next backward is the one that reduces".
        if self.ddp.require_backward_grad_sync:
            return False
        return self._clock.elapsed_s() >= self._threshold_s

    def count(self) -> None:
        """A micro-batch of the current ``weight`` is computed now."""
        self._done = (self._done or 0.0) + self.weight

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the exchange of one bucket; see ``bounded_allreduce``."""
        if self._done is not None:  # the first bucket of a step
            self._share = self._done / self._planned()
            self._done = None
        self._is_timed = False
        if self._share not in (0.0, 1.0):
            # The gradient is a sum over the planned number already; the state is going
            # to multiply by the weight.
            bucket.buffer().detach().div_(self._share)
        self.state.weight = self._share
        is_last = bucket.is_last()
        done = bounded_allreduce(self.state, bucket)
        if is_last:
            self._share = 1.0
        return done


def _reduce_bucket(bounded: BoundedDdp, bucket: GradBucket) -> Future[Tensor]:
    return bounded.reduce(bucket)


def check_threshold(threshold_s: float | None) -> None:
    """Raise ConfigError unless this is None or a time that can pass."""
    if threshold_s is not None and not threshold_s > 0.0:
        raise ConfigError(
            f"threshold_s is None or a positive time, not {threshold_s!r}: "
            "`tailbound plan` finds one from a recorded trace"
        )

"""A framework's DDP module: its gradients are bounded, its denominators right.

A framework divides each micro-batch's loss by the number that it planned for the
optimizer step, before it knows how many there will be. The last window of an epoch may
be shorter, and a threshold may drop some. A rank whose gradient holds d of M planned
micro-batches has the sum of d losses' gradients over M; counted with the weight d / M
and not multiplied by it, the mean over the ranks is

    sum_W (sum of d_w gradients / M)  /  sum_W (d_w / M)

which is the mean over all micro-batches that were computed (docs/design/0010). M and d
may be items as well, such as tokens.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tailbound.errors import ConfigError
from tailbound.training.clocks import ComputeClock, make_clock
from tailbound.training.hook import DdpState


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
        ConfigError: it is no DDP module or has a hook already, the state is none, or
            the threshold is no time.
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
        check_options(state, threshold_s)
        self.ddp, self.state, self.weight = ddp, state, 1.0
        self._planned, self._threshold_s = planned, threshold_s
        self._clock = clock or make_clock(next(ddp.parameters()).device)
        self._is_timed = self._is_reducing = False
        self.begin()
        try:
            ddp.register_comm_hook(self, _reduce_bucket)
        except RuntimeError as error:
            raise ConfigError(
                "this module has a communication hook already: bind it once, and leave "
                "out the framework's own (ddp_comm_hook, comm_hook)"
            ) from error

    def begin(self) -> None:
        """A step begins: micro-batches that no reduction took are forgotten."""
        self._done = 0.0
        self._num_computed = self._num_dropped = 0

    def is_over(self) -> bool:
        """True if the micro-batch to come is dropped: do not compute it.

        Ask once for each. The first question of a step starts its clock.
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
        is_over = self._clock.elapsed_s() >= self._threshold_s
        self._num_dropped += is_over
        return is_over

    def count(self) -> None:
        """A micro-batch of the current ``weight`` is computed now."""
        self._done += self.weight
        self._num_computed += 1

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the exchange of one bucket; see ``bounded_allreduce``."""
        if not self._is_reducing:  # the first bucket of a step
            self._weigh()
        self._is_reducing = not bucket.is_last()
        return self.state.reduce(bucket, is_weighted=True)

    def _weigh(self) -> None:
        """Tell the state what is behind the gradients of the step that ends."""
        state, num_computed = self.state, self._num_computed
        if num_computed:
            planned = self._planned()
            # A step without any items is a mean over nothing, and counts nowhere.
            state.weight = self._done / planned if planned else 0.0
            state.computed = num_computed
            state.planned = num_computed + self._num_dropped
        else:  # such as the second optimizer's in one training step
            state.weight, state.computed, state.planned = 1.0, 1.0, 1
        self._is_timed = False
        self.begin()


def _reduce_bucket(bounded: BoundedDdp, bucket: GradBucket) -> Future[Tensor]:
    return bounded.reduce(bucket)


def check_options(state: DdpState, threshold_s: float | None) -> None:
    """Refuse what cannot be, before the framework starts.

    Raises:
        ConfigError: no state of the hook, or a threshold that is no time.
    """
    if not isinstance(state, DdpState):
        raise ConfigError(f"state is made by tailbound.ddp_state(), not {state!r}")
    if threshold_s is not None and not threshold_s > 0.0:
        raise ConfigError(
            f"threshold_s is None or a positive time, not {threshold_s!r}: "
            "`tailbound plan` finds one from a recorded trace"
        )

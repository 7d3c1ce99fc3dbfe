"""A communication hook: DistributedDataParallel stays, its buckets are bounded.

    ddp.register_comm_hook(tailbound.ddp_state(), tailbound.bounded_allreduce)

The exchange of a bucket overlaps with the rest of the backward: the hook starts it and
returns a future, which the transport's thread completes. Buckets are matched across
ranks by the order of calls within a step, never by DDP's index, which DDP changes after
the first step.

Source: FIELD S07 to S11, what users of hooks reported; docs/design/0030.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError, TailboundError
from tailbound.protocol.events import Reduced
from tailbound.records import Record, StepReport
from tailbound.training.accumulate import Work
from tailbound.training.buckets import NAMES
from tailbound.training.leaving import note_closed, note_open
from tailbound.training.rendezvous import find_place, join_mesh
from tailbound.training.step_records import describe_step, label_rounds
from tailbound.transport.mesh import Answer, MeshGroup

_log = logging.getLogger("tailbound")


class DdpState:
    """What the hook keeps between its calls. Made by ``ddp_state``.

    It is plain data but for its connections: a copy, or one that was pickled, meets
    the other ranks anew, with any number of them, at its first use.
    """

    weight: float
    """What is behind this rank's next gradients, such as its samples or tokens; the
    mean is weighted by it. Set it before the backward; 1 counts all ranks alike."""
    loss_scale: float
    """Factor that the loss is multiplied by (AMP's scaler), for the detector."""
    error: TailboundError | ConfigError | None
    """Why the job failed, if it did: DDP shows hook errors as plain RuntimeErrors."""
    last_step: StepReport | None
    """What the newest complete step cost and lost."""

    def __init__(
        self,
        network: LossBound,
        transport: Transport,
        on_record: Callable[[Record], None] | None,
        run: str,
    ) -> None:
        self.network, self.transport = network, transport
        self.run = run
        self.weight = self.loss_scale = 1.0
        self.step = 0
        """Steps that were begun."""
        self.error = None
        self.last_step = None
        self._on_record = on_record
        self._open_parts()

    def _open_parts(self) -> None:
        """What a copy does not take along."""
        self._mesh: MeshGroup | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._begun_s: float | None = None
        self._ended_s = time.perf_counter()
        self._reduced: list[Reduced] = []
        self._num_begun = 0
        self._is_step_whole = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: plain numbers."""
        return {"step": self.step, "weight": self.weight, "loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, with any number of ranks."""
        self.step = int(state["step"])
        self.weight = float(state["weight"])
        self.loss_scale = float(state["loss_scale"])

    def __getstate__(self) -> dict[str, Any]:
        settings = {"network": self.network, "transport": self.transport}
        return {**self.state_dict(), **settings, "run": self.run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.network, self.transport = state["network"], state["transport"]
        self.run, self.error, self.last_step = state["run"], None, None
        self._on_record = None
        self.load_state_dict(state)
        self._open_parts()

    def raise_if_failed(self) -> None:
        """Raise the error of the exchange with its own type, if there was one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Say goodbye to the other ranks. Closing twice is fine."""
        if self._leave() and self._mesh is not None:
            self._mesh.close()

    def abort(self, reason: str) -> None:
        """Leave because of an error; the other ranks are told the reason."""
        if self._leave() and self._mesh is not None:
            self._mesh.abort(reason)

    def _leave(self) -> bool:
        if self._is_closed:
            return False
        self._is_closed = True
        note_closed(self)
        return True

    # -- what the hook does ----------------------------------------------------

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the exchange of one bucket; see ``bounded_allreduce``."""
        if self._is_closed:
            raise JobClosedError("the hook's state is closed; register a new one")
        buffer, is_last = bucket.buffer(), bucket.is_last()
        self._check(buffer)
        done: Future[Tensor] = Future()
        if find_place().world_size == 1:
            done.set_result(buffer)
            return done
        mesh = self._meet()
        with self._lock:
            if self._begun_s is None:
                self._begun_s = time.perf_counter()
                self.step += 1
                self._reduced, self._num_begun = [], 0
            self._num_begun += 1
            self._is_step_whole = is_last
        flat = buffer.detach()
        if self.weight != 1.0:
            flat.mul_(self.weight)
        values = flat.cpu() if flat.is_cuda else flat

        def finish(answer: Answer) -> None:
            if isinstance(answer, Exception):
                self.error = self.error or answer
                _fail(done, answer)
                return
            try:
                if values is not flat:
                    flat.copy_(values)
                self._note(answer)
            except Exception as error:  # noqa: BLE001 - on_record is the user's
                # Whoever waits for the bucket must hear of it, and nobody else would.
                _fail(done, error)
            else:
                done.set_result(buffer)

        mesh.start(
            _values(values),
            dtype=NAMES[buffer.dtype],
            weight=self.weight,
            step=self.step,
            is_last=is_last,
            on_done=finish,
            ends_L=_ends(bucket) if self.network.per_layer else (),
            loss_scale=self.loss_scale,
        )
        return done

    def _check(self, buffer: Tensor) -> None:
        """Refuse what cannot travel.

        Raises:
            ConfigError: a sparse gradient, or one of an integer or complex dtype.
        """
        if buffer.layout is not torch.strided:
            raise ConfigError(
                "sparse gradients do not travel within a loss bound; build the "
                "embedding with sparse=False"
            )
        if buffer.dtype not in NAMES:
            allowed = ", ".join(NAMES.values())
            raise ConfigError(
                f"a gradient of {buffer.dtype}; those of {allowed} travel"
            )

    def _meet(self) -> MeshGroup:
        if self._mesh is None:
            self._mesh = join_mesh(find_place(), self.network, self.transport)
            note_open(self)
        return self._mesh

    def _note(self, reduced: Reduced) -> None:
        """One bucket is through; with the last one the step is."""
        with self._lock:
            self._reduced.append(reduced)
            if not self._is_step_whole or len(self._reduced) < self._num_begun:
                return
            parts = sorted(self._reduced, key=lambda event: event.bucket)
            begun_s, self._begun_s = self._begun_s or 0.0, None
        now_s = time.perf_counter()
        rounds = label_rounds(parts, run=self.run, step=self.step)
        work = Work(
            weight=self.weight,
            planned=1,
            computed=1.0,
            partial_share=0.0,
            latency_s=(),
            overshoot_s=None,
            loss=None,
        )
        self.last_step = describe_step(
            parts,
            rounds,
            work,
            run=self.run,
            rank=find_place().rank,
            step=self.step,
            # The exchange overlaps with the backward: from its first bucket on.
            compute_s=begun_s - self._ended_s,
            exchange_s=now_s - begun_s,
            threshold_s=None,
        )
        self._ended_s = now_s
        if self._on_record is not None:
            for report in rounds:
                self._on_record(report)
            self._on_record(self.last_step)


def ddp_state(
    *,
    network: LossBound = LossBound(),  # noqa: B008 - frozen
    transport: Transport | None = None,
    on_record: Callable[[Record], None] | None = None,
    run: str = "",
) -> DdpState:
    """Make the state of ``bounded_allreduce`` for one DDP module.

    Args:
        network: the loss bound.
        transport: how bytes travel; the sharded plan.
        on_record: called with every record as it is made, in the transport's thread.
        run: label written into the records.

    Raises:
        ConfigError: no loss bound, or the server plan.
    """
    transport = transport or Transport()
    if not isinstance(network, LossBound):
        raise ConfigError(f"network is a tailbound.LossBound, not {network!r}")
    if transport.plan != "sharded":
        raise ConfigError(
            'the hook reduces without a server: leave Transport(plan="sharded"), or '
            "use tailbound.attach with the server plan"
        )
    return DdpState(network, transport, on_record, run)


def bounded_allreduce(state: DdpState, bucket: GradBucket) -> Future[Tensor]:
    """Reduce one of DDP's buckets within the loss bound; give to register_comm_hook.

    Args:
        state: made by ``ddp_state``, one for each DDP module.
        bucket: what DDP hands over: float32, float64, float16 or bfloat16, dense. Moved
            as it is and summed in float32 at least.

    Returns:
        A future of the bucket's buffer, which then holds the weighted mean over all
        ranks, bit-identical on all of them. It is completed in the transport's thread.

    Raises:
        ConfigError: the bucket cannot travel.
        TailboundError: the job has failed. Through DDP it arrives as it is here, and
            as a RuntimeError with the same words where the future carries it;
            ``state.error`` is the error itself.
    """
    if not isinstance(state, DdpState):
        raise ConfigError(
            "register_comm_hook(tailbound.ddp_state(...), tailbound.bounded_allreduce):"
            f" the state is {type(state).__name__}"
        )
    try:
        return state.reduce(bucket)
    except (TailboundError, ConfigError) as error:
        state.error = state.error or error
        raise


def _fail(done: Future[Tensor], error: Exception) -> None:
    # torch's own annotation asks for the future's type here; any exception is meant.
    done.set_exception(error)  # type: ignore[arg-type]


def _values(flat: Tensor) -> NDArray[Any]:
    """The tensor's memory; bfloat16, which NumPy lacks, as uint16."""
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.uint16).numpy()
    return flat.numpy()


def _ends(bucket: GradBucket) -> tuple[int, ...]:
    """Where each gradient ends in the bucket."""
    sizes = [math.prod(gradient.shape) for gradient in bucket.gradients()]
    return tuple(np.cumsum(sizes).tolist())

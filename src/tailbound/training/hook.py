"""A communication hook: DistributedDataParallel stays, its buckets are bounded.

    ddp.register_comm_hook(tailbound.ddp_state(), tailbound.bounded_allreduce)

The exchange of a bucket overlaps with the rest of the backward: the hook starts it and
returns a future, which the transport's thread completes. Buckets are matched across
ranks by the order of calls within a step, never by DDP's index, which DDP changes after
the first step.

Source: FIELD S07 to S11, what users of hooks reported; docs/design/0030.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, TailboundError
from tailbound.protocol.events import Reduced
from tailbound.records import Record
from tailbound.training.buckets import NAMES
from tailbound.training.job_state import compare_states
from tailbound.training.mesh_steps import (
    MeshSteps,
    check_gradient,
    check_settings,
    multiply,
    wire_values,
)
from tailbound.training.rendezvous import find_place, join_mesh
from tailbound.transport.mesh import Answer, MeshGroup


class DdpState(MeshSteps):
    """What the hook keeps between its calls. Made by ``ddp_state``.

    It is plain data but for its connections: a copy, or one that was pickled, meets
    the other ranks anew, with any number of them, at its first use.
    """

    error: Exception | None
    """Why the job failed, if it did: DDP shows hook errors as plain RuntimeErrors. One
    that ``on_record`` raised counts too."""
    _regime: dict[str, Any] | None = None
    """What the next loss bounds follow from: of the mesh, or of a checkpoint."""

    def __init__(
        self,
        network: LossBound,
        transport: Transport,
        on_record: Callable[[Record], None] | None,
        run: str,
    ) -> None:
        self.network, self.transport = network, transport
        self.error = None
        super().__init__(on_record, run)

    def _open_parts(self) -> None:
        super()._open_parts()
        self._lock = threading.Lock()
        self._begun_s: float | None = None
        self._reduced: list[Reduced] = []
        self._num_begun = 0
        self._is_step_whole = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, between two steps: dicts, lists and numbers.

        The regime is equal on all ranks; ``weight`` and ``loss_scale`` are this rank's.
        """
        self._take_regime()
        return {
            "step": self.step,
            "weight": self.weight,
            "loss_scale": self.loss_scale,
            "regime": self._regime,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint before the first step, with any number of ranks.

        All ranks load the same regime or none, which is checked when they meet.

        Raises:
            ConfigError: steps were run already.
        """
        if self._mesh is not None:
            raise ConfigError("load the hook's state before the first step, not after")
        self.step = int(state["step"])
        self.weight = float(state["weight"])
        self.loss_scale = float(state["loss_scale"])
        self._regime = state.get("regime")

    def _take_regime(self) -> None:
        """Take note of the regime; of a job that has failed the last one stays."""
        if self._mesh is not None and not self._is_closed:
            with contextlib.suppress(TailboundError):
                self._regime = self._mesh.regime_state()

    def close(self) -> None:
        """Say goodbye to the other ranks. Closing twice is fine."""
        self._take_regime()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("network", "transport", "run", "planned", "computed")
        return {**self.state_dict(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.network, self.transport = state["network"], state["transport"]
        self.run, self.error, self.last_step = state["run"], None, None
        self.planned, self.computed = state["planned"], state["computed"]
        self._on_record = None
        self._open_parts()
        self.load_state_dict(state)

    def raise_if_failed(self) -> None:
        """Raise the error of the exchange with its own type, if there was one."""
        if self.error is not None:
            raise self.error

    def _join(self) -> MeshGroup:
        mesh = join_mesh(find_place(), self.network, self.transport)
        try:
            self._resume(mesh)
        except (TailboundError, ConfigError) as error:
            mesh.abort(str(error))
            raise
        return mesh

    def _resume(self, mesh: MeshGroup) -> None:
        """Go on under the regime that was loaded, if all ranks loaded the same.

        Raises:
            HandshakeError: they did not.
            ConfigError: it is no regime.
        """
        if self._regime is not None:
            mesh.load_regime_state(self._regime)
        # Also: none begins a step before all have loaded, or its bound is another.
        compare_states(mesh.all_gather(msgspec.json.encode(self._regime)))

    # -- what the hook does ----------------------------------------------------

    def reduce(
        self, bucket: GradBucket, *, is_weighted: bool = False
    ) -> Future[Tensor]:
        """Start the exchange of one bucket; see ``bounded_allreduce``.

        Args:
            bucket: what DDP hands over.
            is_weighted: the gradients are multiplied by the weight already, as sums
                over samples are.
        """
        try:
            return self._start(bucket, is_weighted)
        except (TailboundError, ConfigError) as error:
            self.error = self.error or error
            raise

    def _start(self, bucket: GradBucket, is_weighted: bool) -> Future[Tensor]:
        self._require_open()
        buffer, is_last = bucket.buffer(), bucket.is_last()
        flat = buffer.detach()
        factor = 1.0 if is_weighted and self.weight else self.weight
        check_gradient(flat, factor)
        done: Future[Tensor] = Future(devices=future_devices(buffer.device))
        if find_place().world_size == 1:
            if is_weighted and self.weight:
                flat.div_(self.weight)
            elif is_weighted:
                flat.zero_()
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
        multiply(flat, factor)
        values = flat.cpu()

        def finish(answer: Answer) -> None:
            try:
                if isinstance(answer, Exception):
                    raise answer
                if values is not flat:
                    flat.copy_(values)
                self._note(answer)
            except Exception as error:  # noqa: BLE001 - on_record is the user's
                # Whoever waits for the bucket must hear of it, and nobody else would.
                self.error = self.error or error
                # torch's annotation asks for the future's type; an exception is meant.
                done.set_exception(error)  # type: ignore[arg-type]
            else:
                done.set_result(buffer)

        mesh.start(
            wire_values(values),
            dtype=NAMES[buffer.dtype],
            weight=self.weight,
            step=self.step,
            is_last=is_last,
            on_done=finish,
            ends_L=_ends(bucket) if self.network.per_layer else (),
            loss_scale=self.loss_scale,
            computed=self.computed,
            planned=self.planned,
        )
        return done

    def _note(self, reduced: Reduced) -> None:
        """One bucket is through; with the last one the step is."""
        with self._lock:
            self._reduced.append(reduced)
            if not self._is_step_whole or len(self._reduced) < self._num_begun:
                return
            parts = sorted(self._reduced, key=lambda event: event.bucket)
            begun_s, self._begun_s = self._begun_s or 0.0, None
        # The exchange overlaps with the backward: from its first bucket on.
        exchange_s = time.perf_counter() - begun_s
        self._tell(parts, rank=find_place().rank, exchange_s=exchange_s)


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
    transport = check_settings(network, transport)
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
        ConfigError: the bucket cannot travel; or it is float16 and ``state.weight`` is
            over 1, which could overflow: give weights that are shares of the largest.
        TailboundError: the job has failed. Through DDP it arrives as it is here, and
            as a RuntimeError with the same words where the future carries it;
            ``state.error`` is the error itself.
    """
    if not isinstance(state, DdpState):
        raise ConfigError(
            "register_comm_hook(tailbound.ddp_state(...), tailbound.bounded_allreduce):"
            f" the state is {type(state).__name__}"
        )
    return state.reduce(bucket)


def future_devices(device: torch.device) -> list[int | str | torch.device]:
    """What the future of a bucket on this device must know of.

    A GPU's mean is copied back in a stream of the transport's thread: with its device
    the future makes those who take the bucket from it wait for that copy.
    """
    return [] if device.type == "cpu" else [device]


def _ends(bucket: GradBucket) -> tuple[int, ...]:
    """Where each gradient ends in the bucket."""
    sizes = [math.prod(gradient.shape) for gradient in bucket.gradients()]
    return tuple(np.cumsum(sizes).tolist())

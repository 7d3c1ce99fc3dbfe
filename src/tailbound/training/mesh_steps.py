"""Gradients through a mesh, step after step: the hook and FSDP's replicas share it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError
from tailbound.protocol.events import Reduced
from tailbound.records import Record, StepReport
from tailbound.training.accumulate import Work
from tailbound.training.buckets import NAMES
from tailbound.training.leaving import note_closed, note_open
from tailbound.training.step_records import describe_step, label_rounds
from tailbound.transport.mesh import MeshGroup


class MeshSteps(ABC):
    """This rank's gradients: what is behind them, and what each step left.

    The mesh is opened at the first use.
    """

    weight: float
    """What is behind this rank's next gradients, such as its samples or tokens; the
    mean is weighted by it. Set it before the backward; 1 counts all ranks alike. At
    most 1 for float16 gradients, which could overflow."""
    planned: int
    """Micro-batches that were to be in the next gradients, for the report."""
    computed: float
    """Those that are in them, 0 to ``planned``."""
    loss_scale: float
    """Factor that the loss is multiplied by (AMP's scaler), for the detector."""
    step: int
    """Steps that were begun."""
    last_step: StepReport | None
    """What the newest complete step cost and lost."""

    def __init__(self, on_record: Callable[[Record], None] | None, run: str) -> None:
        self.run = run
        self.weight = self.computed = self.loss_scale = 1.0
        self.planned, self.step = 1, 0
        self.last_step = None
        self._on_record = on_record
        self._open_parts()

    def _open_parts(self) -> None:
        """What a copy does not take along."""
        self._mesh: MeshGroup | None = None
        self._is_closed = False
        self._ended_s = time.perf_counter()

    @abstractmethod
    def _join(self) -> MeshGroup:
        """Meet the other ranks."""

    def _meet(self) -> MeshGroup:
        self._require_open()
        if self._mesh is None:
            self._mesh = self._join()
            note_open(self)
        return self._mesh

    def _require_open(self) -> None:
        if self._is_closed:
            raise JobClosedError(
                "this exchange is closed: register a new state, or bind the model anew"
            )

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

    def _tell(self, parts: Sequence[Reduced], *, rank: int, exchange_s: float) -> None:
        """Make the records of a step that ends now.

        Args:
            parts: one for each bucket, in their order.
            rank: this process.
            exchange_s: the exchange; the rest since the last step is compute.
        """
        now_s = time.perf_counter()
        rounds = label_rounds(parts, run=self.run, step=self.step)
        work = Work(
            weight=self.weight,
            planned=self.planned,
            computed=self.computed,
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
            rank=rank,
            step=self.step,
            compute_s=now_s - self._ended_s - exchange_s,
            exchange_s=exchange_s,
            threshold_s=None,
            loss_scale=self.loss_scale,
        )
        self._ended_s = now_s
        if self._on_record is not None:
            for report in rounds:
                self._on_record(report)
            self._on_record(self.last_step)


def check_gradient(gradient: Tensor, factor: float) -> None:
    """Refuse what cannot travel.

    A float16 gradient is not multiplied by more than 1: it could overflow to inf where
    the mean does not. A wider dtype on the wire for such weights alone is not possible,
    since the ranks must agree on one and know only their own weights. A factor below 1
    can cost bits of values under 6e-5, as a division by the number of ranks does.

    Args:
        gradient: as it came.
        factor: by which ``multiply`` is going to multiply it.

    Raises:
        ConfigError: a sparse gradient, one of an integer or complex dtype, or one of
            float16 with a factor over 1.
    """
    if gradient.layout is not torch.strided:
        raise ConfigError(
            "sparse gradients do not travel within a loss bound; build the "
            "embedding with sparse=False"
        )
    if gradient.dtype not in NAMES:
        allowed = ", ".join(NAMES.values())
        raise ConfigError(f"a gradient of {gradient.dtype}; those of {allowed} travel")
    if gradient.dtype is torch.float16 and factor > 1.0:
        raise ConfigError(
            f"a float16 gradient times the weight {factor} could overflow: divide the "
            "weights of all ranks by one number, the largest that a rank can have"
        )


def multiply(gradient: Tensor, factor: float) -> None:
    """Multiply in place and in the gradient's dtype; by 0 also what is not finite."""
    if factor == 0.0:
        gradient.zero_()
    elif factor != 1.0:
        gradient.mul_(factor)


def wire_values(flat: Tensor) -> NDArray[Any]:
    """The memory of a tensor on the CPU; bfloat16, which NumPy lacks, as uint16."""
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.uint16).numpy()
    return flat.numpy()


def check_settings(network: LossBound, transport: Transport | None) -> Transport:
    """The transport, or the default one, if a mesh can have these settings.

    Raises:
        ConfigError: no loss bound, a lossy way back, or the server plan.
    """
    transport = transport or Transport()
    if not isinstance(network, LossBound):
        raise ConfigError(f"network is a tailbound.LossBound, not {network!r}")
    if network.p_back:
        raise ConfigError(
            f"p_back={network.p_back} lets replicas differ until they are made equal, "
            "which DDP and FSDP have no place for: use tailbound.attach, or leave it 0"
        )
    if transport.plan != "sharded":
        raise ConfigError(
            "these gradients are reduced without a server: leave "
            'Transport(plan="sharded"), or use tailbound.attach with the server plan'
        )
    return transport

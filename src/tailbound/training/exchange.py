"""What a job exchanges through: a bounded-loss group, a process group, or nothing."""

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tailbound.config import LossBound
from tailbound.errors import ConfigError, PeerLostError
from tailbound.protocol.events import Reduced
from tailbound.protocol.messages import BucketSpec
from tailbound.training.resync import resync
from tailbound.transport.group import Group
from tailbound.transport.mesh import MeshGroup

_log = logging.getLogger("tailbound")

AllGather = Callable[[bytes], tuple[bytes, ...]]
"""Exchanges byte strings exactly; one per rank comes back, in rank order."""


class Exchange(ABC):
    """The exchanges that a job needs, the same calls on every rank."""

    rank: int
    world_size: int
    resync_every: int = 0
    """Steps after which replicas are to be made equal; 0: they cannot differ."""

    @abstractmethod
    def all_reduce(
        self,
        flat: Tensor,
        values_N: NDArray[Any],
        weight: float,
        *,
        learning_rate: float | None,
        loss_scale: float,
        computed: float,
        planned: int,
        is_last: bool,
    ) -> Reduced:
        """Replace a gradient, already multiplied by the weight, by the mean.

        Args:
            flat: the bucket as a tensor; shares its memory with ``values_N``.
            values_N: the bucket in the wire dtype.
            weight: what is behind it.
            learning_rate: of the optimizer, if it has one.
            loss_scale: factor that the gradient carries.
            computed: micro-batches behind it.
            planned: micro-batches that were to be behind it.
            is_last: the step has no further bucket.
        """

    @abstractmethod
    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """Exchange byte strings exactly; one per rank, in rank order."""

    @abstractmethod
    def close(self) -> None:
        """Leave in good order."""

    def abort(self, reason: str) -> None:
        """Leave because of an error and tell the others, where that is possible."""
        self.close()

    def is_resync_due(self, step: int) -> bool:
        """True if replicas are to be made equal after this step."""
        return self.resync_every > 0 and step % self.resync_every == 0

    def resync(self, flats: Sequence[Tensor]) -> float:
        """Take every parameter from its owner; see ``training.resync``.

        Args:
            flats: the parameters of each bucket, flat, in CPU memory. Overwritten.

        Returns:
            How far this rank was from the owners; 0 where replicas cannot differ.
        """
        return 0.0

    def regime_state(self) -> dict[str, Any] | None:
        """What the next loss bounds follow from, if this rank knows it."""
        return None

    @abstractmethod
    def load_regime_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's, where there is a loss bound.

        Raises:
            ConfigError: it is no such state.
        """


class GroupExchange(Exchange):
    """Over the bounded-loss transport."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.world_size = group.rank, group.world_size

    def all_reduce(
        self,
        flat: Tensor,
        values_N: NDArray[Any],
        weight: float,
        *,
        learning_rate: float | None,
        loss_scale: float,
        computed: float,
        planned: int,
        is_last: bool,
    ) -> Reduced:
        """See Exchange."""
        return self._group.all_reduce(
            values_N,
            weight,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            computed=computed,
            planned=planned,
        )

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """See Exchange."""
        return self._group.all_gather(data)

    def close(self) -> None:
        """See Exchange."""
        self._group.close()

    def abort(self, reason: str) -> None:
        """See Exchange."""
        self._group.abort(reason)

    def load_regime_state(self, state: dict[str, Any]) -> None:
        """Nothing: the server decides, and begins anew with every job."""
        if self.rank == 0:
            _log.warning(
                "the checkpoint's regime is left out: in the server plan the server "
                "decides the loss bound, and starts critical"
            )


class MeshExchange(Exchange):
    """Over the bounded-loss transport, without a server."""

    def __init__(
        self, mesh: MeshGroup, specs: Sequence[BucketSpec], bound: LossBound
    ) -> None:
        self._mesh = mesh
        self.rank, self.world_size = mesh.rank, mesh.world_size
        self.resync_every = bound.resync_every if bound.p_back else 0
        self._buckets = [
            (spec.dtype, _ends(spec) if bound.per_layer else ()) for spec in specs
        ]
        self._turn = 0

    def all_reduce(
        self,
        flat: Tensor,
        values_N: NDArray[Any],
        weight: float,
        *,
        learning_rate: float | None,
        loss_scale: float,
        computed: float,
        planned: int,
        is_last: bool,
    ) -> Reduced:
        """See Exchange."""
        dtype, ends_L = self._buckets[self._turn]
        self._turn = 0 if is_last else self._turn + 1
        return self._mesh.all_reduce(
            values_N,
            weight,
            dtype=dtype,
            is_last=is_last,
            ends_L=ends_L,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            computed=computed,
            planned=planned,
        )

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """See Exchange."""
        return self._mesh.all_gather(data)

    def close(self) -> None:
        """See Exchange."""
        self._mesh.close()

    def abort(self, reason: str) -> None:
        """See Exchange."""
        self._mesh.abort(reason)

    def resync(self, flats: Sequence[Tensor]) -> float:
        """See Exchange."""
        return resync(self._mesh, flats, [dtype for dtype, _ in self._buckets])

    def regime_state(self) -> dict[str, Any] | None:
        """See Exchange; equal on all ranks."""
        return self._mesh.regime_state()

    def load_regime_state(self, state: dict[str, Any]) -> None:
        """See Exchange."""
        self._mesh.load_regime_state(state)


def _ends(spec: BucketSpec) -> tuple[int, ...]:
    """Where each tensor ends in its bucket."""
    sizes = (math.prod(shape) for shape in spec.shapes)
    return tuple(itertools.accumulate(sizes))


class ExactExchange(Exchange):
    """What the two exact exchanges share: no bound, no regime, no round reports."""

    @abstractmethod
    def average(self, flat: Tensor, told: tuple[float, ...]) -> tuple[float, ...]:
        """Replace the bucket by the mean over ranks; returns what is told, summed.

        The first number told is the weight. With a total weight of 0 the bucket is
        left as it is.
        """

    def all_reduce(
        self,
        flat: Tensor,
        values_N: NDArray[Any],
        weight: float,
        *,
        learning_rate: float | None,
        loss_scale: float,
        computed: float,
        planned: int,
        is_last: bool,
    ) -> Reduced:
        """See Exchange."""
        total, all_computed, all_planned = self.average(
            flat, (weight, computed, planned)
        )
        norm = 0.0
        if total:
            scaled = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
            norm = scaled / loss_scale
        return Reduced(
            0,
            0,
            total,
            0.0,
            True,
            norm,
            None,
            "exact",
            (),
            all_computed,
            round(all_planned),
        )

    def load_regime_state(self, state: dict[str, Any]) -> None:
        """See Exchange: there is no bound."""


class LocalExchange(ExactExchange):
    """A job of one rank: no socket, no peer."""

    rank, world_size = 0, 1

    def average(self, flat: Tensor, told: tuple[float, ...]) -> tuple[float, ...]:
        """See ExactExchange."""
        if told[0]:
            flat.div_(told[0])
        return told

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """See Exchange."""
        return (data,)

    def close(self) -> None:
        """See Exchange."""


class ProcessGroupExchange(ExactExchange):
    """Over torch's default process group.

    Raises:
        ConfigError: the group cannot carry CPU tensors.
    """

    def __init__(self) -> None:
        backends = dist.get_backend_config()
        if "cpu:" not in backends:
            raise ConfigError(
                "network=None averages gradients in CPU memory, which this process "
                f"group ({backends}) cannot; use "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def average(self, flat: Tensor, told: tuple[float, ...]) -> tuple[float, ...]:
        """See ExactExchange; sums in float32 at least, so float16 cannot overflow.

        Raises:
            PeerLostError: another rank is gone, or the group was destroyed.
        """
        narrow = flat.dtype in (torch.float16, torch.bfloat16)
        sum_N = flat.float() if narrow else flat.clone()
        if told[0] == 0.0:
            sum_N.zero_()
        told_T = torch.tensor(told, dtype=torch.float64)
        with _named("an exact average"):
            dist.all_reduce(sum_N)
            dist.all_reduce(told_T)
        totals: tuple[float, ...] = tuple(told_T.tolist())
        if totals[0]:
            flat.copy_(sum_N.div_(totals[0]))
        return totals

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """See Exchange.

        Raises:
            PeerLostError: another rank is gone, or the group was destroyed.
        """
        with _named("an all-gather"):
            sizes_W = [
                torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)
            ]
            dist.all_gather(sizes_W, torch.tensor([len(data)]))
            parts = []
            for rank, size in enumerate(int(size) for size in sizes_W):
                part = torch.zeros(size, dtype=torch.uint8)
                if rank == self.rank and size:
                    part = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
                if size:
                    dist.broadcast(part, rank)
                parts.append(part.numpy().tobytes())
        return tuple(parts)

    def close(self) -> None:
        """See Exchange: the process group is the user's to destroy."""


@contextmanager
def _named(phase: str) -> Iterator[None]:
    """Give torch's RuntimeError and ValueError the name of a lost peer."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLostError(("another rank",), phase, reason) from error

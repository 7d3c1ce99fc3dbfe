"""What the ranks of a mesh agreed on, and the machines that follow from it."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.protocol.chunks import ChunkLayout, send_order
from tailbound.protocol.deadline import Deadlines
from tailbound.protocol.events import Direction, RoundKey, peer_name
from tailbound.protocol.plan import Limits
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.repair import Repairs
from tailbound.protocol.sender import Sender
from tailbound.protocol.shards import Shard, cut_shards
from tailbound.protocol.sinks import Sink
from tailbound.reduction import WireFormat, chunk_norms, widen
from tailbound.residual import Residuals


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What the ranks of a mesh agreed on, and what this one keeps between rounds."""

    rank: int
    world_size: int
    bound: LossBound
    room_bytes: int
    limits: Limits
    deadlines: Deadlines = field(init=False, compare=False)
    """Of what the other ranks send to this one; learned while they do."""
    residuals: Residuals | None = field(init=False, compare=False)
    """What of this rank's gradients was lost, with ``holes="residual"``."""
    owed: Residuals | None = field(init=False, compare=False)
    """What of this rank's means was lost, with ``p_back``."""

    repairs: Repairs = field(init=False, compare=False)
    """What is known of the losses towards each other rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "repairs", Repairs(self.bound))
        object.__setattr__(self, "deadlines", Deadlines(self.bound))
        object.__setattr__(self, "residuals", Residuals.for_bound(self.bound))
        self.forget_owed()

    def cut(
        self, num_elements: int, itemsize: int, slot: int
    ) -> tuple[Shard | None, ...]:
        """Who owns which part of a bucket; see ``cut_shards``."""
        return cut_shards(
            num_elements, itemsize, self.room_bytes, self.world_size, slot
        )

    def forget_owed(self) -> None:
        """Owe no mean: the parameters were made equal otherwise."""
        owed = Residuals() if self.bound.p_back else None
        object.__setattr__(self, "owed", owed)

    def send_order(
        self,
        key: RoundKey,
        part_E: NDArray[Any],
        layout: ChunkLayout,
        wire_format: WireFormat,
    ) -> NDArray[np.int64]:
        """The order in which a gradient's chunks leave, as the bound says."""
        norm_C = None
        if self.bound.order == "norm":
            norm_C = chunk_norms(widen(part_E, wire_format), layout.elements_per_chunk)
        return send_order(
            self.bound.order,
            layout.num_chunks,
            counter=key.counter,
            share=self.rank / self.world_size,
            norm_C=norm_C,
        )

    def back_order(
        self, key: RoundKey, layout: ChunkLayout, peer: int
    ) -> NDArray[np.int64]:
        """The order in which a mean's chunks leave.

        Where none is given up any order does. Else the last to leave, which are the
        first to be given up, are others in each round and towards each peer.
        """
        return send_order(
            "rotate" if self.bound.p_back else "fixed",
            layout.num_chunks,
            counter=key.counter,
            share=peer / self.world_size,
        )

    def make_sender(
        self,
        key: RoundKey,
        layout: ChunkLayout,
        order_C: NDArray[np.int64],
        peer: int,
        now: float,
    ) -> Sender:
        """The sender of one shard to one peer."""
        is_back = key.direction is Direction.BACK
        return Sender(
            key,
            layout,
            order_C,
            peer=peer_name(peer),
            now=now,
            window_bytes=self.limits.window_bytes,
            # The round has a deadline, which names every rank that is late.
            timeout_s=math.inf,
            silence_s=self.limits.silence_s,
            is_ascending=is_back or self.bound.order != "norm",
            repair=self.repairs.of(peer, key.direction),
        )

    def make_receiver(
        self, key: RoundKey, layout: ChunkLayout, sink: Sink, peer: int, now: float
    ) -> Receiver:
        """The receiver of one shard from one peer; a gradient is bounded later."""
        return Receiver(
            key,
            layout,
            sink,
            loss_bound=self.bound.p_back if key.direction is Direction.BACK else 0.0,
            peer=peer_name(peer),
            now=now,
            timeout_s=math.inf,
            window_bytes=self.limits.window_bytes,
        )

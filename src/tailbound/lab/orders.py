"""What the demo tells its processes, and what they answer: JSON lines over pipes."""

from typing import Literal

import msgspec

from tailbound.config import ComputeBound, LossBound
from tailbound.impairments import BurstLoss, Impairments, IndependentLoss, LossModel
from tailbound.records import Record
from tailbound.report.outcome import Stragglers


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The network that the demo imitates; the same for every run."""

    rtt_ms: float
    """Round-trip time between worker and server, in milliseconds."""
    loss: float
    """Background loss in both directions, a share in [0, 1)."""
    burst: float
    """Loss of what the server receives in the burst rounds, a share in [0, 1)."""
    burst_rounds: tuple[int, ...]
    mtu: int
    """Bytes of an IP packet."""
    seed: int

    def impairments(self, receiver: int) -> Impairments:
        """What a process's receiving path suffers: 0 is the server, 1 + rank a worker.

        Bursts strike where senders meet, at the server's port (incast).
        """
        losses: list[LossModel] = []
        if self.loss:
            losses.append(IndependentLoss(rate=self.loss))
        if receiver == 0 and self.burst and self.burst_rounds:
            losses.append(BurstLoss(rate=self.burst, rounds=self.burst_rounds))
        return Impairments(
            losses=tuple(losses),
            delay_s=self.rtt_ms / 2e3,
            seed=self.seed * 1000 + receiver,
        )


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Serve one run."""

    run: str
    world_size: int
    timeout_s: float
    conditions: Conditions


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Train one run."""

    run: str
    server: str = ""
    """Its address; known once it listens."""
    task: str
    data: str | None
    epochs: int
    batch_size: int
    bound: LossBound
    compute: ComputeBound | None = None
    stragglers: Stragglers | None = None
    """How this worker is slowed down; None: it is not, and takes one micro-batch."""
    timeout_s: float
    conditions: Conditions


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    """The server listens at ``address``; a worker has imported all it needs ("")."""

    address: str = ""


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="kind"):
    """The run is over for this process, in good order."""


class Broken(msgspec.Struct, frozen=True, tag="broken", tag_field="kind"):
    """The run failed; one line for the user."""

    message: str


Answer = Ready | Done | Broken | Record
decode_answer = msgspec.json.Decoder(Answer).decode

Role = Literal["server", "worker"]

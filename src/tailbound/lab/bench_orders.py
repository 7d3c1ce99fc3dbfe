"""What the benchmark tells its ranks, and what they answer: JSON lines over pipes.

A round is three orders to every rank, each answered by all before the next is given:
``Prepare`` (Ready), ``Go`` (Finished), ``Settle`` (Settled).
"""

from typing import Literal

import msgspec

from tailbound.config import LossBound, Plan
from tailbound.lab.orders import Broken, Ready

Side = Literal["tailbound", "gloo"]


class Host(msgspec.Struct, frozen=True, tag="host"):
    """Open the store in which the ranks meet, and say where (``Listening``)."""

    address: str
    """Of this rank's host."""
    timeout_s: float


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Meet the other ranks (``Ready``)."""

    rank: int
    world_size: int
    host: str
    """Address of rank 0's host, where the store is."""
    store_port: int
    device: str
    """Network interface that the rank's packets leave by, whose bytes are counted."""
    num_elements: int
    """Of the gradient, float32."""
    sides: tuple[Side, ...]
    plan: Plan
    bound: LossBound
    seed: int
    timeout_s: float


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Make round ``number``'s gradient, and read the counters."""

    number: int


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Reduce it."""

    side: Side
    at_s: float
    """On the monotonic clock, which all processes of a machine share."""


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """All ranks are through: read the counters again, and check the result."""


Order = Host | Join | Prepare | Go | Settle


class Listening(msgspec.Struct, frozen=True, tag="listening", tag_field="kind"):
    """The store is there."""

    port: int


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="kind"):
    """This rank has the result."""

    latency_s: float
    """From its start to its result, in seconds."""


class Settled(
    msgspec.Struct, frozen=True, kw_only=True, tag="settled", tag_field="kind"
):
    """What the round cost this rank, and what came of it."""

    user_s: float
    """CPU time in the program, in seconds."""
    system_s: float
    """CPU time in the kernel, in seconds."""
    wire_bytes: int
    """Sent by the interface, whoever sent them."""
    digest: str
    """Of the result's bytes; equal on all ranks."""
    is_exact: bool
    """The result is the known one, bit for bit."""
    p: float
    """Loss bound; 0 with Gloo."""
    missing: int
    """Chunks of this rank's gradient that were given up."""
    chunks: int
    """Of this rank's gradient."""


BenchAnswer = Listening | Ready | Finished | Settled | Broken
decode_bench_answer = msgspec.json.Decoder(BenchAnswer).decode

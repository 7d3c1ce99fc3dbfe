"""What all ranks agreed on before the first round; cuts buckets and names rounds.

Buckets take turns: round i is bucket i modulo the number of buckets.
"""

from dataclasses import dataclass, field

from tailbound.config import LossBound
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.repair import Repairs
from tailbound.protocol.wire import COUNTER_PERIOD
from tailbound.reduction import FORMATS


@dataclass(frozen=True, slots=True)
class Limits:
    """What an endpoint allows a round; durations in seconds."""

    window_bytes: int
    timeout_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks agreed on: buckets, sizes, bound, and where the counter starts."""

    buckets: tuple[BucketSpec, ...]
    bound: LossBound
    room_bytes: int
    world_size: int
    limits: Limits
    first_counter: int = 1
    repairs: Repairs = field(init=False, compare=False)
    """What is known of the losses towards each peer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "repairs", Repairs(self.bound))

    def layout(self, bucket: int) -> ChunkLayout:
        """How a bucket is cut."""
        spec = self.buckets[bucket]
        itemsize = FORMATS[spec.dtype].wire.itemsize
        return ChunkLayout(spec.num_elements, itemsize, self.room_bytes)

    def key(self, index: int, direction: Direction) -> RoundKey:
        """The key of round ``index`` (from 0)."""
        counter = (self.first_counter + index) % COUNTER_PERIOD
        return RoundKey(counter, index % len(self.buckets), direction)

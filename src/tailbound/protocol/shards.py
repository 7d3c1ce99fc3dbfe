"""Who owns which part of a bucket in a mesh, and how each part is cut into chunks."""

import functools
from dataclasses import dataclass

from tailbound.protocol.chunks import ChunkLayout


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements [first, stop) of a bucket, reduced by one rank."""

    first: int
    stop: int
    layout: ChunkLayout


@functools.lru_cache(maxsize=4096)
def cut_shards(
    num_elements: int, itemsize: int, room_bytes: int, world_size: int, slot: int
) -> tuple[Shard | None, ...]:
    """Cut a bucket into whole chunks for all ranks, as evenly as that goes.

    A bucket of fewer chunks than ranks leaves some without a shard; which ones moves
    with ``slot``, so that small buckets do not all land on the same rank.

    Args:
        num_elements: N of the bucket.
        itemsize: bytes of an element.
        room_bytes: bytes of data in a datagram.
        world_size: ranks.
        slot: order of the bucket in its step.

    Returns:
        One for each rank; None: it owns nothing of this bucket.
    """
    whole = ChunkLayout(num_elements, itemsize, room_bytes)
    num_owners = min(world_size, whole.num_chunks)
    share, extra = divmod(whole.num_chunks, num_owners)
    shards: list[Shard | None] = [None] * world_size
    start = 0
    for number in range(num_owners):
        first = start * whole.elements_per_chunk
        start += share + (number < extra)
        stop = min(num_elements, start * whole.elements_per_chunk)
        owner = number if num_owners == world_size else (slot + number) % world_size
        layout = ChunkLayout(stop - first, itemsize, room_bytes)
        shards[owner] = Shard(first, stop, layout)
    return tuple(shards)

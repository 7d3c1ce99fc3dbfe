"""Which datagrams are of the open round, and what the others are counted as."""

import numpy as np
import pytest

from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.intake import LinkCounters, count_invalid, sort_datagrams
from tailbound.protocol.wire import HEADER, headers_untrusted, make_header

KEY = RoundKey(5, 1, Direction.IN)
LAYOUT = ChunkLayout(10, itemsize=4, room_bytes=16)
"""Chunks 0 and 1 of four float32, chunk 2 of two."""
EXPECTED = make_header(KEY, session=77, rank=3)


def datagram(sequence: int, num_bytes: int = 16, **changes: int) -> bytes:
    header = EXPECTED.copy()
    header["sequence"], header["length"] = sequence, num_bytes
    for name, value in changes.items():
        header[name] = value
    return header.tobytes() + bytes(num_bytes)


def sort(*datagrams: bytes) -> tuple[list[bool], LinkCounters]:
    segment_bytes = len(datagrams[0])
    data = memoryview(b"".join(datagrams))
    headers_K = headers_untrusted(data, len(datagrams), segment_bytes)
    counters = LinkCounters()
    use_K = sort_datagrams(data, headers_K, segment_bytes, EXPECTED, LAYOUT, counters)
    return use_K.tolist(), counters


def test_chunks_of_the_open_round_are_accepted_in_any_order() -> None:
    assert sort(datagram(1), datagram(0), datagram(1)) == (
        [True, True, True],
        LinkCounters(accepted=3),
    )


def test_the_short_last_chunk_is_accepted() -> None:
    assert sort(datagram(2, 8)) == ([True], LinkCounters(accepted=1))


@pytest.mark.parametrize(
    ("wrong", "counters"),
    [
        (datagram(0, counter=4), LinkCounters(accepted=2, stale=1)),
        (datagram(0, counter=2**32 - 1), LinkCounters(accepted=2, stale=1)),
        (datagram(0, bucket=0), LinkCounters(accepted=2, stale=1)),
        (datagram(0, kind=1), LinkCounters(accepted=2, stale=1)),
        (datagram(0, kind=2), LinkCounters(accepted=2, stale=1)),
        (datagram(0, kind=3), LinkCounters(accepted=2, malformed=1)),
        (datagram(0, version=0), LinkCounters(accepted=2, malformed=1)),
        (datagram(0, version=2, session=1), LinkCounters(accepted=2, malformed=1)),
        (datagram(0, session=78), LinkCounters(accepted=2, foreign=1)),
        (datagram(0, rank=2), LinkCounters(accepted=2, foreign=1)),
        (datagram(0, rank=2, counter=4), LinkCounters(accepted=2, foreign=1)),
        (datagram(0, length=15), LinkCounters(accepted=2, malformed=1)),
        (datagram(0, length=65535), LinkCounters(accepted=2, malformed=1)),
        (datagram(2), LinkCounters(accepted=2, malformed=1)),
        (datagram(3), LinkCounters(accepted=2, malformed=1)),
        (datagram(2**32 - 1), LinkCounters(accepted=2, malformed=1)),
    ],
)
def test_one_useless_datagram_is_counted_by_kind_and_its_neighbours_are_taken(
    wrong: bytes, counters: LinkCounters
) -> None:
    assert sort(datagram(0), wrong, datagram(1)) == ([True, False, True], counters)


@pytest.mark.parametrize(
    ("sequence", "num_bytes"),
    [
        (0, 8),  # a full chunk's number with a short one's bytes
        (2, 12),
        (0, 12),
        (0, 0),
        (0, 20),
        (2**32 - 1, 8),
    ],
)
def test_a_datagram_of_another_size_is_malformed(sequence: int, num_bytes: int) -> None:
    assert sort(datagram(sequence, num_bytes)) == ([False], LinkCounters(malformed=1))


def test_without_a_short_chunk_a_bare_header_is_malformed() -> None:
    layout = ChunkLayout(8, itemsize=4, room_bytes=16)
    data = memoryview(datagram(2, 0))
    headers_K = headers_untrusted(data, 1, 24)
    counters = LinkCounters()

    use_K = sort_datagrams(data, headers_K, 24, EXPECTED, layout, counters)

    assert use_K.tolist() == [False]
    assert counters == LinkCounters(malformed=1)


def test_pings_are_checked_for_version_session_and_rank() -> None:
    headers_K = np.zeros(5, HEADER)
    headers_K["version"], headers_K["kind"] = [1, 2, 1, 1, 1], [2, 2, 3, 2, 2]
    headers_K["session"], headers_K["rank"] = [7, 7, 7, 8, 7], [3, 3, 3, 3, 4]
    counters = LinkCounters()

    ours_K = count_invalid(headers_K, session=7, rank=3, counters=counters)

    assert ours_K.tolist() == [True, False, False, False, False]
    assert counters == LinkCounters(malformed=2, foreign=2)


def test_no_header_has_the_rank_of_a_peer_that_has_not_said_it() -> None:
    headers_K = np.zeros(1, HEADER)
    headers_K["version"], headers_K["rank"] = 1, 65535
    counters = LinkCounters()

    assert not count_invalid(headers_K, session=0, rank=-1, counters=counters).any()
    assert counters == LinkCounters(foreign=1)


def test_counters_of_links_add_up() -> None:
    total = LinkCounters(1, 2, 3, 4) + LinkCounters(10, 20, 30, 40)

    assert total == LinkCounters(accepted=11, stale=22, foreign=33, malformed=44)

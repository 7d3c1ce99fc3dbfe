"""The receiving path through a bad network: what it drops, doubles, delays, joins."""

from typing import Any

import numpy as np

from tailbound.impairments import BurstLoss, Impairments, IndependentLoss
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.wire import make_header
from tailbound.testing import ImpairedPath
from tailbound.testing.impaired_path import Batch


def make_path(seed: int = 7, **settings: Any) -> ImpairedPath:
    return ImpairedPath(Impairments(**settings), np.random.default_rng(seed))


def batch_of(*datagrams: bytes) -> Batch:
    data = b"".join(datagrams)
    return Batch(memoryview(data), len(data), len(datagrams[0]))


def datagrams_of(batches: list[Batch]) -> list[bytes]:
    found = []
    for data, num_bytes, segment_bytes in batches:
        raw = bytes(data[:num_bytes])
        found += [
            raw[start : start + segment_bytes]
            for start in range(0, num_bytes, segment_bytes)
        ]
    return found


def numbered(num: int, size: int = 30, counter: int = 1) -> list[bytes]:
    datagrams = []
    for sequence in range(num):
        header = make_header(RoundKey(counter, 0, Direction.IN), 5, 0)
        header["sequence"] = sequence
        datagrams.append(header.tobytes() + bytes(size - 24))
    return datagrams


def test_a_good_path_hands_on_everything_at_once_and_as_it_came() -> None:
    path = make_path()
    sent = [*numbered(3), b"short last one"]

    path.push_datagrams(batch_of(*sent), now=1.0)
    path.push_control(b"control", now=1.0)

    assert datagrams_of(path.pop_datagrams(1.0)) == sent
    assert path.pop_control(1.0) == [b"control"]
    assert path.next_due_s() is None
    assert path.dropped == 0


def test_the_memory_of_a_batch_may_be_reused_at_once() -> None:
    path = make_path(delay_s=0.5)
    memory = bytearray(b"aabb")

    path.push_datagrams(Batch(memoryview(memory), 4, 2), now=0.0)
    memory[:] = b"xxxx"

    assert datagrams_of(path.pop_datagrams(0.5)) == [b"aa", b"bb"]


def test_a_constant_delay_holds_back_datagrams_and_control_alike() -> None:
    path = make_path(delay_s=0.25)
    sent = numbered(4)

    path.push_datagrams(batch_of(*sent), now=1.0)
    path.push_control(b"probe", now=1.0)

    assert path.next_due_s() == 1.25
    assert path.holds_control
    assert path.pop_datagrams(1.24) == []
    assert path.pop_control(1.24) == []
    assert datagrams_of(path.pop_datagrams(1.25)) == sent
    assert path.pop_control(1.25) == [b"probe"]
    assert not path.holds_control


def test_what_is_due_first_is_named_whichever_kind_it_is() -> None:
    path = make_path(delay_s=0.25)
    assert path.next_due_s() is None

    path.push_control(b"first", now=1.0)
    assert path.next_due_s() == 1.25
    path.push_datagrams(batch_of(b"second"), now=1.5)
    assert path.next_due_s() == 1.25
    path.pop_control(1.25)

    assert path.next_due_s() == 1.75


def test_loss_is_counted_and_takes_datagrams_only() -> None:
    path = make_path(losses=(IndependentLoss(rate=0.5),))

    path.push_datagrams(batch_of(*numbered(1000)), now=0.0)
    for _ in range(20):
        path.push_control(b"kept", now=0.0)

    survivors = datagrams_of(path.pop_datagrams(0.0))
    assert path.dropped + len(survivors) == 1000
    assert 400 < path.dropped < 600
    assert len(path.pop_control(0.0)) == 20


def test_a_path_that_loses_everything_hands_on_nothing() -> None:
    path = make_path(losses=(IndependentLoss(rate=1.0),))

    path.push_datagrams(batch_of(*numbered(10)), now=0.0)

    assert path.pop_datagrams(0.0) == []
    assert path.dropped == 10


def test_a_burst_hits_the_rounds_that_the_headers_name() -> None:
    path = make_path(losses=(BurstLoss(rate=1.0, rounds=(2,)),))
    lost, kept = numbered(3, counter=2), numbered(3, counter=3)

    path.push_datagrams(batch_of(*lost, *kept), now=0.0)
    path.push_datagrams(batch_of(b"no header"), now=0.0)

    assert datagrams_of(path.pop_datagrams(0.0)) == [*kept, b"no header"]
    assert path.dropped == 3


def test_duplicates_arrive_twice() -> None:
    path = make_path(duplicate_share=1.0)
    first, second = numbered(2)

    path.push_datagrams(batch_of(first, second), now=0.0)

    assert datagrams_of(path.pop_datagrams(0.0)) == [first, first, second, second]


def test_reordered_datagrams_come_after_later_ones() -> None:
    path = make_path(reorder_share=0.5, delay_s=0.01)
    sent = numbered(100)

    path.push_datagrams(batch_of(*sent), now=0.0)
    early = datagrams_of(path.pop_datagrams(0.01))
    late = datagrams_of(path.pop_datagrams(0.02))

    assert early == [datagram for datagram in sent if datagram not in late]
    assert late == [datagram for datagram in sent if datagram not in early]
    assert 20 < len(late) < 80


def test_jitter_mixes_datagrams_and_leaves_control_in_order() -> None:
    path = make_path(jitter_s=0.01)
    sent = numbered(50)
    words = [b"%d" % number for number in range(50)]

    path.push_datagrams(batch_of(*sent), now=0.0)
    for word in words:
        path.push_control(word, now=0.0)
    arrived = datagrams_of(path.pop_datagrams(0.01))

    assert arrived != sent
    assert sorted(arrived) == sorted(sent)
    assert path.pop_control(0.01) == words


def test_neighbours_of_one_size_are_joined_to_one_batch() -> None:
    path = make_path(jitter_s=0.001)
    for size in (30, 30, 40):
        path.push_datagrams(batch_of(*numbered(1, size=size)), now=float(size))

    batches = path.pop_datagrams(100.0)

    assert [(num, size) for _, num, size in batches] == [(60, 30), (40, 40)]


def test_the_same_seed_gives_the_same_path() -> None:
    def run(seed: int) -> list[bytes]:
        path = make_path(
            seed, losses=(IndependentLoss(rate=0.3),), jitter_s=0.01, delay_s=0.01
        )
        path.push_datagrams(batch_of(*numbered(40)), now=0.0)
        return datagrams_of(path.pop_datagrams(1.0))

    assert run(3) == run(3)
    assert run(3) != run(4)

"""What worker and server have in common: links, datagrams by fate, the UDP check."""

from typing import Any

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import (
    PeerProtocolError,
    RemoteError,
    ShapeError,
    TailboundError,
    UnreachableError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import (
    SERVER_RANK,
    Direction,
    Gathered,
    Reduced,
    RoundKey,
)
from tailbound.protocol.intake import LinkCounters
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.wire import make_header, make_ping
from tailbound.testing import FakeNet

CHUNK = 362
"""float32 elements of a datagram at MTU 1500: (1472 - 24) / 4."""
VECTOR = (BucketSpec("float32", ("w",), ((3 * CHUNK + 10,),)),)
NUM = 3 * CHUNK + 10
SESSION = 1
"""FakeNet's with seed 0."""


def grads(*values: float) -> list[Any]:
    return [np.full(NUM, value, np.float32) for value in values]


def datagram(
    *,
    counter: int = 1,
    bucket: int = 0,
    direction: Direction = Direction.IN,
    session: int = SESSION,
    rank: int = 0,
    sequence: int = 0,
    length: int = 4 * CHUNK,
    room: int = 4 * CHUNK,
    value: float = float("nan"),
    **raw: int,
) -> bytes:
    header = make_header(RoundKey(counter, bucket, direction), session, rank)
    header["sequence"], header["length"] = sequence, length
    for name, number in raw.items():
        header[name] = number
    return header.tobytes() + np.full(room // 4, value, np.float32).tobytes()


def started(world_size: int = 2, p: float = 0.0, **settings: Any) -> FakeNet:
    net = FakeNet(world_size, VECTOR, LossBound.fixed(p), **settings)
    net.start()
    return net


# -- UDP both ways --------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "way"),
    [
        ({"from_ranks": (1,)}, "from there to here;"),
        ({"to_ranks": (1,)}, "from here to there;"),
        ({"from_ranks": (1,), "to_ranks": (1,)}, "there to here nor from here to"),
    ],
    ids=["up", "down", "both"],
)
def test_udp_that_is_blocked_while_tcp_works_is_found_before_training(
    cut: dict[str, Any], way: str
) -> None:
    delay = Impairments(delay_s=0.01)
    net = FakeNet(2, VECTOR, LossBound(), to_server=delay, to_worker=delay)
    net.cut_udp(**cut)

    with pytest.raises(TailboundError, match="UDP"):
        net.start()

    assert isinstance(net.server.error, UnreachableError)
    assert net.server.error.protocol == "UDP"
    assert net.server.error.peer == "rank 1"
    assert "UDP to rank 1 at fake 1 port 2 does not get through" in str(
        net.server.error
    )
    assert way in str(net.server.error)
    assert net.now <= 5.03


def test_blocked_udp_is_found_on_the_worker_too() -> None:
    """Without a word of the server, which gives its error at the same time."""
    net = FakeNet(1, VECTOR, LossBound(), to_worker=Impairments(delay_s=1.0))
    net.cut_udp(to_ranks=(0,))

    with pytest.raises(TailboundError):
        net.start()
    net.workers[0].handle_timer(6.0)

    error = net.workers[0].error
    assert isinstance(error, UnreachableError | RemoteError)
    assert "UDP" in str(error)


def test_udp_that_dies_after_round_5_is_found_in_round_6() -> None:
    """At the largest bound that there is, and never a success."""
    delay = Impairments(delay_s=0.001)
    net = started(p=0.99, to_server=delay, to_worker=delay, silence_s=5.0)
    for _ in range(5):
        net.all_reduce(grads(1.0, 2.0), [1.0, 1.0])
    stopped_s = net.now
    net.cut_udp(from_ranks=(1,))

    net.begin(grads(1.0, 2.0), [1.0, 1.0])

    with pytest.raises(UnreachableError, match="UDP to the server at the gradient"):
        net.run_until(Reduced, (1,))
    net.run_for(0.01)  # rank 0 hears of it from the server

    assert net.server.error is not None
    assert "no datagram arrived for" in str(net.server.error)
    assert isinstance(net.workers[0].error, RemoteError)
    assert net.now - stopped_s < 5.2


def test_udp_that_dies_on_the_way_back_is_found_by_the_server() -> None:
    delay = Impairments(delay_s=0.001)
    net = started(to_server=delay, to_worker=delay, silence_s=5.0)
    net.cut_udp(to_ranks=(1,))
    net.begin(grads(1.0, 2.0), [1.0, 1.0])

    with pytest.raises(RemoteError, match="no datagram arrived"):
        net.run_until(Reduced, (1,))

    assert isinstance(net.server.error, UnreachableError)
    assert net.server.error.peer == "rank 1"


def test_a_burst_shorter_than_the_silence_is_sat_out() -> None:
    """Nothing arrives for 4 of 5 seconds; the repairs meanwhile stay few."""
    delay = Impairments(delay_s=0.001)
    net = started(to_server=delay, to_worker=delay, silence_s=5.0)
    net.cut_udp(from_ranks=(0, 1))
    values = grads(1.0, 2.0)
    net.begin(values, [1.0, 1.0])
    net.run_for(4.0)

    net.mend_udp()
    events = net.run_until(Reduced)

    assert values[0].tolist() == [1.5] * NUM
    # 8 at the speed of the link, then 1, 2, 4 ... ms apart, at last 50 ms: 4 s / 52 ms.
    assert events[0].reports[0].sends < 100


@pytest.mark.parametrize(
    ("max_bytes", "payload_bytes"),
    [(1472, 1448), (1471, 1208), (1232, 1208), (1231, 524), (548, 524)],
)
def test_a_path_that_carries_less_than_both_ends_believe_gets_smaller_chunks(
    max_bytes: int, payload_bytes: int
) -> None:
    net = FakeNet(2, VECTOR, LossBound.fixed(0.0), max_datagram_bytes=max_bytes)

    events = net.start()
    values = grads(2.0, 4.0)
    (reduced, _) = net.all_reduce(values, [1.0, 1.0])

    assert [event.payload_bytes for event in events] == [payload_bytes] * 2
    assert values[1].tolist() == [3.0] * NUM
    assert reduced.reports[0].retransmitted == 0


def test_a_path_below_the_smallest_packet_counts_as_blocked() -> None:
    net = FakeNet(1, VECTOR, LossBound(), max_datagram_bytes=547)

    with pytest.raises(TailboundError, match="UDP"):
        net.start()


def test_the_smaller_of_two_mtus_counts_for_all() -> None:
    net = FakeNet(3, VECTOR, LossBound.fixed(0.0), mtu=[9000, 1500, 9000])

    events = net.start()

    assert [event.payload_bytes for event in events] == [1448] * 3


def test_a_start_over_a_path_that_loses_most_datagrams_succeeds() -> None:
    lossy = Impairments(losses=(IndependentLoss(rate=0.8),), delay_s=0.001)

    net = FakeNet(3, VECTOR, LossBound(), to_server=lossy, to_worker=lossy, seed=11)

    assert len(net.start()) == 3


# -- datagrams by fate ----------------------------------------------------------


@pytest.mark.parametrize(
    ("forged", "fate"),
    [
        (datagram(counter=2), "stale"),
        (datagram(counter=0), "stale"),
        (datagram(bucket=1), "stale"),
        (datagram(direction=Direction.BACK), "stale"),
        (datagram(session=2), "foreign"),
        (datagram(rank=1), "foreign"),
        (datagram(rank=SERVER_RANK), "foreign"),
        (datagram(sequence=3), "malformed"),
        (datagram(sequence=2**32 - 1), "malformed"),
        (datagram(length=4), "malformed"),
        (datagram(length=65535), "malformed"),
        (datagram(room=4 * CHUNK - 4, length=4 * CHUNK - 4), "malformed"),
        (datagram(room=4 * CHUNK + 4, length=4 * CHUNK + 4), "malformed"),
        (datagram(room=40, length=40, sequence=2), "malformed"),
        (datagram(room=0, length=0), "malformed"),
        (datagram(version=0), "malformed"),
        (datagram(version=2), "malformed"),
        (datagram(kind=3), "malformed"),
        (datagram()[:23], "malformed"),
        (b"\x00", "malformed"),
        (b"\xff" * 1472, "malformed"),
        (make_ping(2, 0, 100), "foreign"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_datagram_that_does_not_belong_is_counted_and_changes_nothing(
    forged: bytes, fate: str
) -> None:
    net = started()
    net.begin(grads(2.0, 4.0), [1.0, 1.0])
    before = net.server.counters()

    net.inject(0, forged)
    after = net.server.counters()
    net.run_until(Reduced)

    changed = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("accepted", "stale", "foreign", "malformed")
        if getattr(after, name) != getattr(before, name)
    }
    assert changed == {fate: 1}


def test_forged_datagrams_on_both_ways_leave_the_mean_exact() -> None:
    net = started()
    values = grads(2.0, 4.0)
    net.begin(values, [1.0, 1.0])
    for rank in range(2):
        for sequence in range(5):
            net.inject(rank, datagram(rank=1 - rank, sequence=sequence))
            net.inject(rank, datagram(rank=rank, counter=2, sequence=sequence))
            back = Direction.BACK
            for counter in (0, 2):
                forged = datagram(rank=SERVER_RANK, counter=counter, direction=back)
                net.inject(rank, forged, to_server=False)
            net.inject(rank, datagram(direction=back), to_server=False)

    net.run_until(Reduced)

    assert values[0].tolist() == [3.0] * NUM
    assert values[1].tobytes() == values[0].tobytes()
    # 5 foreign and 5 stale per rank at the server, 5 and 10 at each worker.
    assert net.server.counters() == LinkCounters(accepted=8, stale=10, foreign=10)
    assert net.workers[0].counters() == LinkCounters(accepted=4, stale=10, foreign=5)


def test_of_a_batch_only_what_belongs_is_taken() -> None:
    net = started(world_size=1)
    net.begin(grads(1.0), [1.0])
    batch = b"".join(
        [
            datagram(value=8.0, sequence=0),
            datagram(sequence=1, session=7),
            datagram(value=9.0, sequence=2),
            datagram(sequence=7),
            make_ping(SESSION, 0, 1472),
            datagram(value=8.0, sequence=0),
            datagram(room=40, length=40, sequence=3, value=10.0),
        ]
    )

    net.server.receive_datagrams(0, memoryview(batch), len(batch), 1472, net.now)

    # A ping is a ping wherever it stands, and useless now.
    assert net.server.counters() == LinkCounters(accepted=4, foreign=1, malformed=1)
    out = memoryview(bytearray(65535))
    while net.workers[0].next_datagrams(
        0, out, net.now, max_segments=1, max_bytes=65535
    ):
        pass  # all of it is lost; the repair brings chunk 1 only
    (event,) = net.run_until(Reduced)
    assert event.reports[0].retransmitted == 1


def test_a_batch_of_no_bytes_is_nothing() -> None:
    net = started()

    net.server.receive_datagrams(0, memoryview(b""), 0, 1, net.now)

    assert net.server.counters() == LinkCounters()


def test_datagrams_before_the_start_are_stale() -> None:
    net = FakeNet(2, VECTOR, LossBound())

    net.inject(0, datagram())
    net.inject(0, datagram(direction=Direction.BACK, rank=SERVER_RANK), to_server=False)

    assert net.server.counters() == LinkCounters(stale=1)
    assert net.workers[0].counters() == LinkCounters(stale=1)


def test_datagrams_from_another_source_address_are_counted_as_foreign() -> None:
    net = started()

    net.server.count_foreign(1, 3)

    assert net.server.counters() == LinkCounters(foreign=3)


# -- the round counter ----------------------------------------------------------


def test_the_counter_wraps_in_the_middle_of_a_job() -> None:
    """FIELD S20: rounds 2**32 - 2, 2**32 - 1, 0, 1 and 2."""
    lossy = Impairments(
        losses=(IndependentLoss(rate=0.2),),
        delay_s=0.001,
        reorder_share=0.3,
        duplicate_share=0.2,
    )
    net = started(
        3, first_counter=2**32 - 2, to_server=lossy, to_worker=lossy, seed=SESSION - 1
    )
    counters = []

    for turn in range(5):
        values = grads(turn + 1.0, turn + 2.0, turn + 6.0)
        (event, *_) = net.all_reduce(values, [1.0, 1.0, 1.0])
        counters.append(event.counter)
        assert values[2].tolist() == [turn + 3.0] * NUM

    assert counters == [4294967294, 4294967295, 0, 1, 2]


def test_a_chunk_saved_from_round_max_stays_out_of_round_0() -> None:
    net = started(world_size=1, first_counter=2**32 - 1)
    net.all_reduce(grads(5.0), [1.0])
    values = grads(7.0)
    net.begin(values, [1.0])

    net.inject(0, datagram(counter=2**32 - 1, value=5.0))
    (event,) = net.run_until(Reduced)

    assert event.counter == 0
    assert values[0].tolist() == [7.0] * NUM
    assert net.server.counters().stale == 1


def test_a_bucket_that_needs_more_chunks_than_the_header_can_number_is_refused() -> (
    None
):
    """2**32 + 1 chunks of 131 elements: above, and not truncated to 1."""
    spec = (BucketSpec("float32", ("w",), ((131 * 2**32 + 1,),)),)
    net = FakeNet(1, spec, LossBound(), mtu=576)

    with pytest.raises((ShapeError, TailboundError)):
        net.start()


# -- all-gather -----------------------------------------------------------------


def test_all_gather_brings_everyone_every_ranks_bytes_in_rank_order() -> None:
    lossy = Impairments(losses=(IndependentLoss(rate=0.5),), delay_s=0.001)
    net = started(3, to_server=lossy, to_worker=lossy)
    large = bytes(range(256)) * 10_000  # 2.56 MB: three pieces

    events = net.all_gather([b"", large, b"z"])

    assert [event.parts for event in events] == [(b"", large, b"z")] * 3


def test_all_gathers_in_a_row_do_not_mix() -> None:
    net = started(2)
    for data in (b"a", b"bb", b""):
        net.workers[0].all_gather(data)
    for data in (b"1", b"", b"333"):
        net.workers[1].all_gather(data)

    for parts in ((b"a", b"1"), (b"bb", b""), (b"", b"333")):
        assert [event.parts for event in net.run_until(Gathered)] == [parts] * 2


def test_an_all_gather_beside_a_round_disturbs_neither() -> None:
    net = started(2)
    values = grads(1.0, 3.0)
    net.begin(values, [1.0, 1.0])
    for worker in net.workers:
        worker.all_gather(b"data")

    net.run_until(Reduced)

    assert values[0].tolist() == [2.0] * NUM


# -- control --------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x00\x00\x00"],
    ids=["length", "body", "empty"],
)
def test_garbage_in_a_peers_control_stream_ends_the_job_and_names_it(
    garbage: bytes,
) -> None:
    net = started(2)

    net.server.receive_control(1, garbage, net.now)

    assert isinstance(net.server.error, PeerProtocolError)
    assert net.server.error.peer == "rank 1"
    with pytest.raises(RemoteError, match="rank 1"):
        net.all_reduce(grads(1.0, 2.0), [1.0, 1.0])


def test_a_control_stream_cut_anywhere_reads_the_same() -> None:
    net = started(1)
    net.begin(grads(4.0), [0.0])
    begin = net.workers[0].next_control(0)
    assert begin is not None

    for byte in begin:
        net.server.receive_control(0, bytes([byte]), net.now)
    net.server.settle(net.now)

    (event,) = net.run_until(Reduced)
    assert event.total_weight == 0.0


def test_a_late_chunk_does_not_look_like_the_next_round() -> None:
    """The server would take it for a sign that the worker has its mean."""
    net = started(world_size=1)
    values = grads(7.0)
    net.cut_udp(to_ranks=(0,))
    net.begin(values, [1.0])
    net.run_for(0.5)

    net.inject(0, datagram(counter=1, value=7.0))
    net.mend_udp()
    net.run_until(Reduced)

    assert net.server.counters().stale == 1
    assert net.server.error is None


def test_each_bucket_has_a_bound_of_its_own() -> None:
    """Norms: bucket 0 stays at 1, bucket 1 falls from 1 to 0.2 of it."""
    buckets = VECTOR * 2
    bound = LossBound(p_low=0.0, p_high=0.4, frequency=2)
    net = FakeNet(1, buckets, bound)
    net.start()
    seen = []

    for value in (1.0, 1.0, 1.0, 0.2, 1.0, 0.2):
        (event,) = net.all_reduce(grads(value), [1.0])
        seen.append((event.bucket, event.p, event.reports[0].p, event.critical))

    assert seen[4:] == [(0, 0.4, 0.4, False), (1, 0.0, 0.0, True)]

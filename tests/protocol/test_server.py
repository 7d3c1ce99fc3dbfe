"""The server's endpoint: meeting the workers, and what it does when one misbehaves."""

import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import (
    HandshakeError,
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    RoundTimeoutError,
    TailboundError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import Failed, Reduced
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Begin,
    BucketSpec,
    Bye,
    Fail,
    GatherPart,
    Hello,
    Message,
    Refuse,
    Welcome,
)
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.wire import ControlReader, encode_control
from tailbound.testing import FakeNet

VECTOR = (BucketSpec("float32", ("w",), ((1000,),)),)
HELLO = Hello(1, 0, 2, "little", VECTOR, LossBound(), 1500, 7000, 1 << 20)


def make_server(world_size: int = 2, **settings: Any) -> ServerEndpoint:
    fields = {"now": 0.0, "timeout_s": 60.0, "silence_s": 5.0} | settings
    return ServerEndpoint(world_size, 99, **fields)


def accept(server: ServerEndpoint, number: int) -> Link:
    link = Link(-1, f"the connection from 10.0.0.{number}:5", f"10.0.0.{number}")
    server.accept(number, link)
    return link


def tell(server: ServerEndpoint, number: int, message: Message) -> None:
    server.receive_control(number, encode_control(message), 0.0)


def told(server: ServerEndpoint, number: int) -> list[Message]:
    """What the server has to say on this link."""
    reader = ControlReader()
    messages: list[Message] = []
    while (data := server.next_control(number)) is not None:
        messages.extend(reader.feed_untrusted(data))
    return messages


def grads(*values: float) -> list[Any]:
    return [np.full(1000, value, np.float32) for value in values]


# -- meeting --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        ({"version": 2}, "1 (the server)", "2 (a worker)"),
        ({"world_size": 3}, "2 (the server)", "3 (rank 1)"),
        ({"rank": 0}, "0 is taken (the server)", "0 of 2"),
        ({"rank": 2}, "0 to 1 (the server)", "2 of 2"),
        ({"rank": -1}, "0 to 1 (the server)", "-1 of 2"),
        ({"byte_order": "big"}, "little (the wire)", "big (rank 1)"),
        ({"bound": LossBound(p_low=0.024)}, "p_low=0.008", "p_low=0.024"),
        ({"buckets": VECTOR * 2}, "1 (rank 0)", "2 (rank 1)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mismatch_in_the_hello_ends_the_start_with_both_values(
    changes: dict[str, Any], ours: str, theirs: str
) -> None:
    server = make_server()
    accept(server, 0)
    accept(server, 1)
    tell(server, 0, HELLO)
    hello = msgspec.structs.replace(HELLO, rank=1)

    tell(server, 1, msgspec.structs.replace(hello, **changes))

    assert isinstance(server.error, HandshakeError)
    assert ours in str(server.error)
    assert theirs in str(server.error)
    refuse = told(server, 1)[0]
    assert isinstance(refuse, Refuse)
    assert ours in refuse.ours
    assert theirs in refuse.theirs
    (fail,) = told(server, 0)
    assert isinstance(fail, Fail)
    assert theirs in fail.message


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("float32", ("w",), ((10,),)), ("bfloat16", ("w",), ((10,),))),
        (("float32", ("w",), ((10,),)), ("float32", ("v",), ((10,),))),
        (("float32", ("w",), ((10,),)), ("float32", ("w",), ((5, 2),))),
        (("float32", ("w",), ((10,),)), ("float32", ("w", "v"), ((5,), (5,)))),
    ],
    ids=["dtype", "name", "shape", "number of tensors"],
)
def test_workers_with_different_models_never_start(ours: Any, theirs: Any) -> None:
    net = FakeNet(2, [(BucketSpec(*ours),), (BucketSpec(*theirs),)], LossBound())

    with pytest.raises(TailboundError, match="build the same model"):
        net.start()

    assert isinstance(net.workers[0].error, RemoteError)
    mismatch = net.workers[1].error
    assert isinstance(mismatch, HandshakeError)
    assert "(rank 0) here" in str(mismatch)
    assert "(rank 1) there" in str(mismatch)


@pytest.mark.parametrize(
    "changes",
    [
        {"buckets": (BucketSpec("float32", ("w",), ()),)},
        {"buckets": (BucketSpec("float32", (), ()),)},
        {"buckets": (BucketSpec("float32", ("w",), ((-1,),)),)},
        {"buckets": (BucketSpec("float32", ("w",), ((0,),)),)},
        {"buckets": (BucketSpec("int32", ("w",), ((9,),)),)},
        {"buckets": (BucketSpec("float32", ("w",), ((2**50,),)),)},
        {"buckets": ()},
        {"mtu": 0},
        {"mtu": 1 << 20},
        {"udp_port": -1},
        {"udp_port": 65536},
    ],
    ids=str,
)
def test_metadata_that_no_worker_of_ours_sends_is_refused(
    changes: dict[str, Any],
) -> None:
    server = make_server(1)
    accept(server, 0)
    hello = msgspec.structs.replace(HELLO, world_size=1)

    tell(server, 0, msgspec.structs.replace(hello, **changes))

    assert isinstance(server.error, HandshakeError)


def test_a_start_that_ranks_are_missing_from_names_them() -> None:
    net = FakeNet(
        4, VECTOR, LossBound(), absent=(1, 3), timeout_s=60.0, join_timeout_s=9.0
    )

    with pytest.raises(PeerLostError, match="lost rank 1, rank 3 during start-up"):
        net.start()

    assert "did not join before the deadline" in str(net.server.error)
    assert net.now == 9.0


def test_a_worker_that_dies_during_the_start_is_named() -> None:
    net = FakeNet(3, VECTOR, LossBound(), absent=(2,), timeout_s=60.0)
    net.deliver()

    net.kill(1)

    with pytest.raises(PeerLostError, match="rank 1 during start-up"):
        net.start()


# -- strangers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        encode_control(Bye()),
        encode_control(Welcome(1, 2, (3,))),
    ],
    ids=["http", "no msgpack", "bye", "welcome"],
)
def test_garbage_of_a_stranger_costs_only_its_own_link(garbage: bytes) -> None:
    net = FakeNet(2, VECTOR, LossBound())
    accept(net.server, 7)

    net.server.receive_control(7, garbage, 0.0)
    net.server.receive_control(7, garbage, 0.0)
    net.server.lose_link(7, "its connection closed", 0.0)
    net.start()

    assert net.server.dropped == [7]
    assert 7 not in net.server.links


def test_a_stranger_that_says_nothing_is_dropped_at_the_start() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    accept(net.server, 7)

    net.start()

    assert net.server.dropped == [7]


def test_a_stranger_that_hangs_up_is_forgotten() -> None:
    server = make_server()
    accept(server, 7)

    server.lose_link(7, "its connection closed", 0.0)

    assert server.dropped == [7]
    assert server.error is None


def test_a_stranger_in_the_middle_of_a_job_does_not_disturb_it() -> None:
    net = FakeNet(2, VECTOR, LossBound.fixed(0.0))
    net.start()
    accept(net.server, 7)
    datagram = bytes(1472)
    net.server.receive_datagrams(7, memoryview(datagram), 1472, 1472, 0.0)

    values = grads(2.0, 4.0)
    net.all_reduce(values, [1.0, 1.0])
    net.close()

    assert values[0].tolist() == [3.0] * 1000
    assert told(net.server, 7) == []


def test_a_latecomer_is_refused_and_the_running_job_goes_on() -> None:
    net = FakeNet(2, VECTOR, LossBound.fixed(0.0))
    net.start()
    accept(net.server, 7)

    tell(net.server, 7, msgspec.structs.replace(HELLO, rank=1))
    (refuse,) = told(net.server, 7)
    net.server.lose_link(7, "its connection closed", 0.0)
    values = grads(2.0, 4.0)
    net.all_reduce(values, [1.0, 1.0])

    assert isinstance(refuse, Refuse)
    assert "1 is taken (the server)" in refuse.ours
    assert net.server.error is None
    assert values[1].tolist() == [3.0] * 1000


# -- rounds ---------------------------------------------------------------------


def test_a_rank_without_anything_counts_with_weight_zero() -> None:
    net = FakeNet(3, VECTOR, LossBound.fixed(0.0))
    net.start()
    values = grads(2.0, 99.0, 10.0)

    events = net.all_reduce(values, [1.0, 0.0, 2.0])

    assert [value.tolist() for value in values] == [[4.0] * 1000] * 3
    assert [event.total_weight for event in events] == [3.0] * 3
    assert [report.direction for report in events[1].reports] == ["back"]


def test_a_round_in_which_nobody_has_anything_leaves_the_buffers_alone() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    values = grads(5.0, 6.0)

    events = net.all_reduce(values, [0.0, 0.0])

    assert [event.total_weight for event in events] == [0.0, 0.0]
    assert values[0].tolist() == [5.0] * 1000
    assert values[1].tolist() == [6.0] * 1000
    assert events[0].verdict == "skipped: no rank had anything"
    assert events[0].reports == ()
    again = net.all_reduce(values, [1.0, 1.0])
    assert again[0].total_weight == 2.0
    assert values[0].tolist() == [5.5] * 1000


@pytest.mark.parametrize("order", ["rotate", "fixed", "norm"])
def test_every_send_order_brings_the_exact_mean(order: Any) -> None:
    impairments = Impairments(losses=(IndependentLoss(rate=0.3),), delay_s=0.001)
    bound = LossBound(p_low=0.0, p_high=0.0, order=order)
    net = FakeNet(3, VECTOR, bound, to_server=impairments, seed=3)
    net.start()
    values = [np.arange(1000, dtype=np.float32) * (rank + 1) for rank in range(3)]

    net.all_reduce(values, [1.0, 1.0, 1.0])

    assert values[0].tolist() == [2.0 * index for index in range(1000)]
    assert values[2].tobytes() == values[0].tobytes()


def lost_chunks(order: Any, counters: int) -> list[set[int]]:
    """Chunks that each round gave up when every round may lose 1 of 2 chunks.

    The first datagram of a round arrives and closes it; the other is lost.
    """
    bound = LossBound(p_low=0.5, p_high=0.5, order=order)
    net = FakeNet(1, (BucketSpec("float32", ("w",), ((724,),)),), bound)
    net.start()
    lost = []
    for _ in range(counters):
        values = np.full(724, 8.0, np.float32)
        values[362:] = 1.0
        worker = net.workers[0]
        worker.all_reduce(values, 1.0, net.now)
        out = memoryview(bytearray(65535))
        batch = worker.next_datagrams(0, out, 0.0, max_segments=1, max_bytes=65535)
        assert batch == (1472, 1472)
        net.inject(0, bytes(out[:1472]))
        net.cut_udp(from_ranks=(0,))
        net.run_until(Reduced)
        lost.append({chunk for chunk in (0, 1) if values[chunk * 362] == 0.0})
    return lost


def test_what_leaves_last_is_given_up_and_the_order_says_what_that_is() -> None:
    assert lost_chunks("fixed", 4) == [{1}] * 4
    assert lost_chunks("norm", 4) == [{1}] * 4
    # Starts at frac(0.618 k) of 2 chunks: 1, 0, 1, 0, 0, 1.
    assert lost_chunks("rotate", 6) == [{0}, {1}, {0}, {1}, {1}, {0}]


@pytest.mark.parametrize(("holes", "expected"), [("zero", 3.0), ("received_mean", 4.5)])
def test_a_hole_is_zero_or_the_mean_of_what_arrived(
    holes: Any, expected: float
) -> None:
    """The worked values 3, 6, 9 with the last one missing, in chunk 1 of 2."""
    bound = LossBound(p_low=0.5, p_high=0.5, holes=holes, order="fixed")
    net = FakeNet(3, (BucketSpec("float32", ("w",), ((724,),)),), bound)
    net.start()
    values = [np.full(724, value, np.float32) for value in (3.0, 6.0, 9.0)]
    net.workers[2].all_reduce(values[2], 1.0, net.now)
    out = memoryview(bytearray(65535))
    net.workers[2].next_datagrams(0, out, 0.0, max_segments=1, max_bytes=65535)
    net.inject(2, bytes(out[:1472]))
    net.cut_udp(from_ranks=(2,))
    for rank in (0, 1):
        net.workers[rank].all_reduce(values[rank], 1.0, net.now)

    net.run_until(Reduced)

    assert values[0][:362].tolist() == [6.0] * 362
    assert values[0][362:].tolist() == [expected] * 362
    assert values[2].tobytes() == values[0].tobytes()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_residual_comes_in_with_later_gradients(momentum: float) -> None:
    """Gradients of 4 and 8, then none: their means add up to 6 everywhere.

    With momentum 0.5 each acts for ever, 1 + 1/2 + 1/4 ... = 2 times, 12 in all; after
    40 rounds what is missing of that is below 1e-9.
    """
    bound = LossBound(
        p_low=0.5, p_high=0.5, holes="residual", residual_momentum=momentum
    )
    impairments = Impairments(losses=(IndependentLoss(rate=0.4),))
    spec = (BucketSpec("float32", ("w",), ((7000,),)),)  # 20 chunks
    net = FakeNet(2, spec, bound, to_server=impairments, seed=3)
    net.start()
    total_N = np.zeros(7000)
    missing = 0

    for step in range(40):
        values = [np.full(7000, g if step == 0 else 0, np.float32) for g in (4, 8)]
        events = net.all_reduce(values, [1.0, 1.0])
        missing += sum(report.missing for e in events for report in e.reports)
        assert values[0].tobytes() == values[1].tobytes()
        total_N += values[0]

    assert missing > 40
    expected = 6.0 if momentum == 0.0 else 12.0
    np.testing.assert_allclose(total_N, expected, rtol=1e-9)


def test_all_ranks_change_the_regime_in_the_same_round() -> None:
    """Norms 1, 1, 1, 0.5: not critical at the check after 2, critical after 4."""
    bound = LossBound(p_low=0.0, p_high=0.4, frequency=2)
    net = FakeNet(3, VECTOR, bound, seed=5)
    net.start()
    seen = []

    for scale in (1.0, 1.0, 1.0, 0.5, 0.5):
        events = net.all_reduce(grads(scale, scale, scale), [1.0] * 3)
        assert len({(e.p, e.critical, e.verdict) for e in events}) == 1
        seen.append((events[0].p, events[0].critical, events[0].ratio))

    assert seen == [
        (0.0, True, None),
        (0.0, True, 0.0),
        (0.4, False, None),
        (0.4, False, 0.5),
        (0.0, True, None),
    ]


def test_a_learning_rate_that_falls_makes_the_next_round_exact() -> None:
    bound = LossBound(p_low=0.0, p_high=0.4, frequency=1, lr_rule=True)
    net = FakeNet(2, VECTOR, bound)
    net.start()
    bounds = []

    for rate in (0.1, 0.1, 0.01, 0.01):
        for worker, values in zip(net.workers, grads(1.0, 1.0), strict=True):
            worker.all_reduce(values, 1.0, net.now, learning_rate=rate)
        (event, _) = net.run_until(Reduced)
        bounds.append(event.p)

    assert bounds == [0.0, 0.0, 0.4, 0.0]


def test_the_bound_of_a_burst_lets_a_round_end_early() -> None:
    """At p = 0.408 one pass is enough under 20 % loss, and the rest never leaves."""
    impairments = Impairments(losses=(IndependentLoss(rate=0.2),), delay_s=0.001)
    spec = (BucketSpec("float32", ("w",), ((362_000,),)),)
    # A window of 64 KiB: the stop comes while the sender waits for marks.
    net = FakeNet(
        1, spec, LossBound.fixed(0.408), to_server=impairments, window_bytes=1
    )
    net.start()

    (event,) = net.all_reduce([np.ones(362_000, np.float32)], [1.0])

    (way_in, _) = event.reports
    assert way_in.early_stop
    assert way_in.sends == 1
    assert way_in.probes == 0
    assert way_in.missing <= 408
    # 592 of 1000 chunks at 80 % arrivals take 740 datagrams, and a window more.
    assert 700 < way_in.sent < 840


# -- goodbye and failure --------------------------------------------------------


def test_the_job_ends_when_all_have_said_goodbye() -> None:
    net = FakeNet(3, VECTOR, LossBound())
    net.start()

    net.close()

    assert net.server.error is None


def test_a_worker_that_leaves_while_others_go_on_is_named() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    net.workers[1].close()
    net.deliver()

    net.workers[0].all_reduce(np.ones(1000, np.float32), 1.0, net.now)

    with pytest.raises(PeerLostError, match="lost rank 1"):
        net.run_until(Reduced, (0,))
    assert "left while others go on" in str(net.server.error)


def test_a_worker_that_leaves_in_the_middle_of_a_round_is_named() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    net.workers[0].all_reduce(np.ones(1000, np.float32), 1.0, net.now)
    net.deliver()

    net.workers[1].close()

    with pytest.raises(PeerLostError, match="lost rank 1"):
        net.run_until(Reduced, (0,))
    assert "left while others go on" in str(net.server.error)


def test_a_worker_that_dies_in_a_round_is_named_to_the_others() -> None:
    impairments = Impairments(delay_s=0.01)
    net = FakeNet(3, VECTOR, LossBound(), to_server=impairments)
    net.start()
    net.begin(grads(1.0, 1.0, 1.0), [1.0] * 3)
    net.turn()

    net.kill(2)

    with pytest.raises(PeerLostError, match="lost rank 2 during the gradient of round"):
        net.run_until(Reduced, (0, 1))
    assert isinstance(net.workers[1].error, PeerLostError)
    assert net.workers[1].error.peers == ("rank 2",)


def test_a_rank_that_never_joins_a_round_is_named_at_its_deadline() -> None:
    net = FakeNet(3, VECTOR, LossBound(), timeout_s=4.0)
    net.start()
    started_s = net.now
    for rank in (0, 2):
        net.workers[rank].all_reduce(np.ones(1000, np.float32), 1.0, net.now)

    with pytest.raises(TailboundError, match="rank 1 did not finish"):
        net.run_until(Reduced, (0, 2))

    assert isinstance(net.server.error, RoundTimeoutError)
    assert net.now == pytest.approx(started_s + 4.0)


def test_a_rank_that_never_joins_an_all_gather_is_named_at_its_deadline() -> None:
    net = FakeNet(3, VECTOR, LossBound(), timeout_s=4.0)
    net.start()
    for rank in (0, 2):
        net.workers[rank].all_gather(b"here")

    net.run_for(3.9)
    assert not net.server.has_failed
    net.run_for(0.1)

    assert isinstance(net.server.error, RoundTimeoutError)
    assert "rank 1 did not finish an all-gather" in str(net.server.error)
    assert isinstance(net.workers[0].error, RemoteError)


def test_an_all_gather_that_a_departed_rank_would_have_to_join_fails_at_once() -> None:
    net = FakeNet(2, VECTOR, LossBound(), timeout_s=60.0)
    net.start()
    net.workers[1].close()
    net.deliver()

    net.workers[0].all_gather(b"here")
    net.deliver()

    assert isinstance(net.server.error, PeerLostError)
    assert net.server.error.peers == ("rank 1",)


def test_an_all_gather_that_a_rank_leaves_in_the_middle_of_fails_at_once() -> None:
    net = FakeNet(2, VECTOR, LossBound(), timeout_s=60.0)
    net.start()
    net.workers[0].all_gather(b"here")
    net.deliver()

    net.workers[1].close()
    net.deliver()

    assert isinstance(net.server.error, PeerLostError)
    assert net.server.error.peers == ("rank 1",)


def test_slow_all_gathers_one_after_the_other_each_have_their_own_deadline() -> None:
    net = FakeNet(2, VECTOR, LossBound(), timeout_s=4.0)
    net.start()
    for _ in range(2):
        net.workers[0].all_gather(b"early")
    for _ in range(2):
        net.run_for(3.0)
        net.workers[1].all_gather(b"late")

    net.run_for(3.0)

    assert net.server.error is None
    assert net.workers[0].error is None


def test_ranks_in_different_rounds_are_an_error_and_never_a_mixture() -> None:
    """FIELD A12: round counters 7 and 8."""
    net = FakeNet(2, VECTOR, LossBound(), first_counter=[7, 8])
    net.start()
    values = grads(1.0, 3.0)

    with pytest.raises(TailboundError, match="round 8, bucket 0"):
        net.all_reduce(values, [1.0, 1.0])

    assert isinstance(net.server.error, PeerProtocolError)
    assert net.server.error.peer == "rank 1"
    assert values[0].tolist() == [1.0] * 1000
    assert values[1].tolist() == [3.0] * 1000


@pytest.mark.parametrize(
    "message",
    [
        Begin(1, 0, float("nan"), None, 1.0),
        Begin(1, 0, -1.0, None, 1.0),
        Begin(1, 0, float("inf"), None, 1.0),
        Begin(1, 0, 1.0, None, 0.0),
        Begin(1, 0, 1.0, None, float("nan")),
        Begin(2, 0, 1.0, None, 1.0),
        Begin(1, 1, 1.0, None, 1.0),
        GatherPart(0, 1, 0, b"x"),
        GatherPart(1, 1, 5, b"x"),
        Welcome(1, 2, (3,)),
        msgspec.structs.replace(HELLO, rank=1),
    ],
    ids=lambda message: repr(message)[:44],
)
def test_a_worker_that_breaks_the_protocol_is_named(message: Message) -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()

    tell(net.server, 1, message)

    assert isinstance(net.server.error, PeerProtocolError)
    assert net.server.error.peer == "rank 1"
    event = net.server.next_event()
    assert isinstance(event, Failed)


def test_a_begin_before_the_start_breaks_the_protocol() -> None:
    server = make_server()
    accept(server, 0)
    tell(server, 0, HELLO)

    tell(server, 0, Begin(1, 0, 1.0, None, 1.0))

    assert isinstance(server.error, PeerProtocolError)
    assert "start-up" in str(server.error)


def test_two_goodbyes_of_one_worker_break_the_protocol() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()

    tell(net.server, 1, Bye())
    tell(net.server, 1, Bye())

    assert isinstance(net.server.error, PeerProtocolError)


def test_after_a_failure_nothing_is_taken_in_any_more() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    net.server.fail(RemoteError("rank 0", "out of memory"))
    failed = net.server.error

    tell(net.server, 1, Begin(9, 9, 1.0, None, 1.0))
    net.server.receive_datagrams(0, memoryview(bytes(1472)), 1472, 1472, 0.0)
    net.server.settle(0.0)
    net.server.handle_timer(1e9)
    net.server.lose_link(1, "its connection closed", 0.0)
    net.server.fail(RemoteError("rank 1", "a second error"))

    assert net.server.error is failed
    assert net.server.counters().malformed == 0


def test_the_bound_is_what_the_workers_bring_along() -> None:
    server = make_server()
    assert server.bound is None
    accept(server, 0)

    tell(server, 0, HELLO)

    assert server.bound == LossBound()


def test_control_bytes_of_a_link_that_is_gone_are_ignored() -> None:
    server = make_server()

    server.receive_control(5, b"anything", 0.0)
    server.lose_link(5, "its connection closed", 0.0)

    assert server.error is None
    assert server.dropped == []

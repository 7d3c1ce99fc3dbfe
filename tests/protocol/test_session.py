"""Meeting: what two peers must agree on, and whether UDP gets through."""

import dataclasses
import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from tailbound.config import LossBound
from tailbound.errors import PeerProtocolError, UnreachableError, WireError
from tailbound.protocol.messages import BucketSpec, Hello, Refuse, Start, Welcome
from tailbound.protocol.session import (
    TRANSITIONS,
    LinkState,
    UdpCheck,
    check_hello,
    check_start_untrusted,
    check_welcome_untrusted,
    find_mismatch,
    next_state,
    ping_sizes,
)

BUCKET = BucketSpec("float32", ("weight", "bias"), ((3, 2), (3,)))
HELLO = Hello(1, 0, 3, "little", (BUCKET,), LossBound(), 1500, 40000, 1 << 20)


def with_bucket(**changes: Any) -> Hello:
    return replace(HELLO, buckets=(replace(BUCKET, **changes),))


# -- transitions ---------------------------------------------------------------

EVENTS = ("agreed", "start", "bye")


def test_the_transitions_are_these() -> None:
    connected, checking, running, closed = LinkState
    expected = {
        (connected, "agreed"): checking,
        (checking, "start"): running,
        (running, "bye"): closed,
    }
    assert expected == TRANSITIONS


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LinkState, EVENTS)))
def test_an_event_leads_where_the_table_says_or_is_an_error(
    state: LinkState, event: str
) -> None:
    after = TRANSITIONS.get((state, event))
    if after is not None:
        assert next_state(state, event, peer="rank 1") is after
        return

    with pytest.raises(PeerProtocolError) as caught:
        next_state(state, event, peer="rank 1")

    assert caught.value.peer == "rank 1"
    assert caught.value.state == state.value
    assert caught.value.got == event


# -- hello ---------------------------------------------------------------------


def refused(hello: Hello, taken: tuple[int, ...] = ()) -> Refuse:
    refusal = check_hello(hello, world_size=3, taken=taken)
    assert refusal is not None
    return refusal


@pytest.mark.parametrize(
    "hello",
    [
        HELLO,
        replace(HELLO, rank=2),
        replace(HELLO, mtu=576),
        replace(HELLO, mtu=65536),
        replace(HELLO, udp_port=0),
        replace(HELLO, udp_port=65535),
        replace(HELLO, window_bytes=0),
        replace(HELLO, window_bytes=-1),
        replace(HELLO, window_bytes=2**64 - 1),
        replace(HELLO, bound=LossBound(window=1 << 20, frequency=2**62)),
        with_bucket(dtype="bfloat16"),
        with_bucket(shapes=((), (0,))),
        with_bucket(shapes=((1 << 32,), (0,))),
        with_bucket(shapes=((1,) * 64, (0,))),
    ],
    ids=str,
)
def test_a_sound_hello_is_welcome(hello: Hello) -> None:
    assert check_hello(hello, world_size=3, taken=(1,)) is None


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (
            replace(HELLO, byte_order="big"),
            Refuse(
                "byte order",
                "little (the wire)",
                "big (rank 0)",
                "run all ranks on little-endian machines",
            ),
        ),
        (
            replace(HELLO, version=2),
            Refuse(
                "protocol version",
                "1 (the server)",
                "2 (a worker)",
                "install the same tailbound version everywhere",
            ),
        ),
        (
            replace(HELLO, world_size=4),
            Refuse(
                "number of workers",
                "3 (the server)",
                "4 (rank 0)",
                "start the server with the job's world size",
            ),
        ),
        (
            replace(HELLO, rank=3),
            Refuse("rank", "0 to 2 (the server)", "3 of 3", "check RANK"),
        ),
        (
            replace(HELLO, rank=-1),
            Refuse("rank", "0 to 2 (the server)", "-1 of 3", "check RANK"),
        ),
        (
            replace(HELLO, rank=1),
            Refuse(
                "rank",
                "1 is taken (the server)",
                "1 of 3",
                "give every worker its own RANK, or its own server to every job",
            ),
        ),
    ],
    ids=lambda value: getattr(value, "field", ""),
)
def test_a_worker_that_does_not_belong_here_is_told_both_sides_values(
    hello: Hello, refusal: Refuse
) -> None:
    assert refused(hello, taken=(1,)) == refusal


@pytest.mark.parametrize(
    ("hello", "field", "theirs"),
    [
        (replace(HELLO, buckets=()), "number of buckets", "0 (rank 0)"),
        (replace(HELLO, buckets=(BUCKET,) * 65537), "number of buckets", "65537"),
        (replace(HELLO, mtu=575), "mtu", "575 (rank 0)"),
        (replace(HELLO, mtu=0), "mtu", "0 (rank 0)"),
        (replace(HELLO, mtu=-1500), "mtu", "-1500 (rank 0)"),
        (replace(HELLO, mtu=65537), "mtu", "65537 (rank 0)"),
        (replace(HELLO, udp_port=-1), "UDP port", "-1 (rank 0)"),
        (replace(HELLO, udp_port=65536), "UDP port", "65536 (rank 0)"),
        (
            replace(HELLO, bound=LossBound(window=(1 << 20) + 1)),
            "LossBound window",
            "1048577 (rank 0)",
        ),
        (with_bucket(dtype="int8"), "dtype", "int8 (rank 0)"),
        (with_bucket(dtype=""), "dtype", " (rank 0)"),
        (with_bucket(names=("weight",)), "metadata", "1 names, 2 shapes (rank 0)"),
        (with_bucket(shapes=((3, 2),)), "metadata", "2 names, 1 shapes (rank 0)"),
        (with_bucket(shapes=((3, -2), (3,))), "shape", "weight [3, -2] (rank 0)"),
        (with_bucket(shapes=((3,), (2**63,))), "shape", f"bias [{2**63}] (rank 0)"),
        (with_bucket(shapes=((2**64 - 1, 0), (1,))), "shape", "weight ["),
        (with_bucket(shapes=((1,) * 65, (1,))), "shape", "weight [1, 1"),
        (with_bucket(names=(), shapes=()), "bytes of a bucket", "0 (rank 0)"),
        (with_bucket(shapes=((0,), (5, 0))), "bytes of a bucket", "0 (rank 0)"),
        (
            with_bucket(shapes=((1 << 32,), (1,))),
            "bytes of a bucket",
            "17179869188 (rank 0)",
        ),
        (
            with_bucket(dtype="bfloat16", shapes=((1 << 32,), (1,))),
            "bytes of a bucket",
            "17179869188 (rank 0)",
        ),
        (
            with_bucket(dtype="float64", shapes=((1 << 31,), (1,))),
            "bytes of a bucket",
            "17179869192 (rank 0)",
        ),
        (with_bucket(shapes=((1 << 34,) * 64, (1,))), "bytes of a bucket", "(rank 0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_the_server_cannot_compute_with_are_refused(
    hello: Hello, field: str, theirs: str
) -> None:
    refusal = refused(hello)

    assert refusal.field == field
    assert theirs in refusal.theirs
    assert "the server" in refusal.ours


def test_an_unknown_dtype_is_told_the_known_ones() -> None:
    refusal = refused(with_bucket(dtype="int8"))

    assert refusal.ours == "float32, float64, float16, bfloat16 (the server)"
    assert refusal.remedy == "train in one of these"


def test_a_second_bucket_is_checked_too() -> None:
    wrong = replace(BUCKET, dtype="complex64")

    assert refused(replace(HELLO, buckets=(BUCKET, wrong))).field == "dtype"


# -- agreement -----------------------------------------------------------------


def test_equal_metadata_agree_whatever_rank_and_address() -> None:
    other = replace(HELLO, rank=1, mtu=9000, udp_port=1, window_bytes=5)

    assert find_mismatch(HELLO, other) is None


@pytest.mark.parametrize(
    ("theirs", "field", "ours_said", "theirs_said"),
    [
        (
            replace(HELLO, bound=dataclasses.replace(LossBound(), eta=0.25)),
            "bound",
            "eta=0.5",
            "eta=0.25",
        ),
        (
            replace(HELLO, buckets=(BUCKET, BUCKET)),
            "number of buckets",
            "1 (rank 0)",
            "2 (rank 1)",
        ),
        (
            with_bucket(dtype="float16"),
            "dtype",
            "float32 (rank 0)",
            "float16 (rank 1)",
        ),
        (
            with_bucket(names=("weight",), shapes=((9,),)),
            "number of tensors",
            "2 (rank 0)",
            "1 (rank 1)",
        ),
        (
            with_bucket(names=("weight", "scale")),
            "tensor",
            "bias [3] (rank 0)",
            "scale [3] (rank 1)",
        ),
        (
            with_bucket(shapes=((2, 3), (3,))),
            "tensor",
            "weight [3, 2] (rank 0)",
            "weight [2, 3] (rank 1)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_difference_is_named_with_both_values_and_ranks(
    theirs: Hello, field: str, ours_said: str, theirs_said: str
) -> None:
    refusal = find_mismatch(HELLO, replace(theirs, rank=1))

    assert refusal is not None
    assert refusal.field == field
    assert ours_said in refusal.ours
    assert "(rank 0)" in refusal.ours
    assert theirs_said in refusal.theirs
    assert "(rank 1)" in refusal.theirs
    assert refusal.remedy


# -- welcome and start -----------------------------------------------------------


@pytest.mark.parametrize(
    "welcome",
    [
        Welcome(0, 0, (548,)),
        Welcome(2**64 - 1, 65535, (65507, 1232, 548)),
        Welcome(1, 1, (32,)),
    ],
)
def test_a_sound_welcome_is_taken(welcome: Welcome) -> None:
    check_welcome_untrusted(welcome)


@pytest.mark.parametrize(
    ("welcome", "says"),
    [
        (Welcome(1, 1, ()), "not falling"),
        (Welcome(1, 1, (548, 1472)), "not falling"),
        (Welcome(1, 1, (548, 548)), "not falling"),
        (Welcome(1, 1, (31,)), "not 32 to 65507"),
        (Welcome(1, 1, (0,)), "not 32 to 65507"),
        (Welcome(1, 1, (1472, -1)), "not 32 to 65507"),
        (Welcome(1, 1, (65508,)), "not 32 to 65507"),
        (Welcome(1, 1, (10**15, 548)), "not 32 to 65507"),
        (Welcome(1, 1, (1472, 1232, 548, 100)), "4 ping sizes"),
        (Welcome(1, -1, (548,)), "UDP port -1"),
        (Welcome(1, 65536, (548,)), "UDP port 65536"),
        (Welcome(-1, 1, (548,)), "session -1"),
    ],
    ids=str,
)
def test_a_welcome_that_no_server_says_is_refused(welcome: Welcome, says: str) -> None:
    with pytest.raises(WireError, match=says):
        check_welcome_untrusted(welcome)


@pytest.mark.parametrize("payload_bytes", [8, 524, 1448])
def test_an_agreed_size_up_to_the_largest_ping_is_taken(payload_bytes: int) -> None:
    check_start_untrusted(Start(payload_bytes, 0), 1472)


@pytest.mark.parametrize("payload_bytes", [-1448, 0, 7, 1449, 2**63])
def test_an_agreed_size_that_cannot_work_is_refused(payload_bytes: int) -> None:
    with pytest.raises(WireError, match="not 8 to 1448"):
        check_start_untrusted(Start(payload_bytes, 0), 1472)


# -- the UDP check -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest_bytes", "expected"),
    [
        (8972, (8972, 1232, 548)),
        (1472, (1472, 1232, 548)),
        (1232, (1232, 548)),
        (548, (548,)),
        (528, (528,)),
    ],
)
def test_the_guaranteed_sizes_are_tried_below_the_mtus(
    largest_bytes: int, expected: tuple[int, ...]
) -> None:
    assert ping_sizes(largest_bytes) == expected


def make_check(now: float = 10.0, timeout_s: float = 60.0) -> UdpCheck:
    return UdpCheck(
        session=9,
        rank=1,
        sizes=(1472, 1232, 548),
        peer="the server",
        address="10.0.0.1 port 5",
        now=now,
        timeout_s=timeout_s,
    )


def test_pings_of_all_sizes_leave_every_20_ms() -> None:
    check = make_check()

    assert [len(ping) for ping in check.due_pings(10.0)] == [1472, 1232, 548]
    assert check.due_pings(10.01) == []
    assert check.timer() == 10.02
    assert [len(ping) for ping in check.due_pings(10.02)] == [1472, 1232, 548]


def test_the_largest_size_both_ways_settles_at_once() -> None:
    check = make_check()
    assert check.receive_ping(1472)
    assert check.settled_bytes(10.1) is None

    check.receive_seen_untrusted(1472)

    assert check.settled_bytes(10.1) == 1472


def test_a_smaller_size_waits_just_200_ms_for_a_larger_one() -> None:
    check = make_check()
    check.receive_ping(548)
    check.receive_seen_untrusted(1472)

    assert check.settled_bytes(10.25) is None
    assert check.settled_bytes(10.4375) is None
    assert check.settled_bytes(10.46) == 548


def test_a_larger_size_that_comes_in_that_time_is_taken() -> None:
    check = make_check()
    check.receive_ping(548)
    check.receive_seen_untrusted(548)
    assert check.settled_bytes(10.25) is None

    check.receive_ping(1232)
    check.receive_seen_untrusted(1232)

    assert check.settled_bytes(10.46) == 1232


def test_a_size_that_cannot_even_leave_here_is_not_waited_for() -> None:
    check = make_check()

    check.exclude(1472)
    check.receive_ping(1232)
    check.receive_seen_untrusted(1232)

    assert [len(ping) for ping in check.due_pings(10.0)] == [1232, 548]
    assert check.settled_bytes(10.0) == 1232


def test_without_any_size_that_can_leave_nothing_settles() -> None:
    check = make_check()

    check.exclude(548)

    assert check.due_pings(10.0) == []
    assert check.settled_bytes(10.0) is None


def test_only_a_larger_ping_is_worth_telling() -> None:
    check = make_check()

    assert check.receive_ping(1232)
    assert not check.receive_ping(1232)
    assert not check.receive_ping(548)
    assert check.receive_ping(1472)


def test_the_peers_largest_ping_never_shrinks() -> None:
    check = make_check()

    check.receive_seen_untrusted(1472)
    check.receive_seen_untrusted(548)

    assert check.peer_seen_bytes == 1472


@pytest.mark.parametrize("num_bytes", [24, 1000, 1473, 65507])
def test_a_ping_of_a_size_that_is_not_tried_is_not_noted(num_bytes: int) -> None:
    check = make_check()

    assert not check.receive_ping(num_bytes)
    assert check.seen_bytes == 0


@pytest.mark.parametrize("num_bytes", [-1, 0, 24, 1473, 2**63])
def test_a_peer_that_saw_what_was_never_sent_is_refused(num_bytes: int) -> None:
    check = make_check()

    with pytest.raises(WireError, match=f"ping of {num_bytes} bytes"):
        check.receive_seen_untrusted(num_bytes)
    assert check.peer_seen_bytes == 0


@pytest.mark.parametrize(
    ("seen", "peer_seen", "says"),
    [
        (0, 0, "from there to here nor from here to there"),
        (1472, 0, "came from here to there"),
        (0, 548, "came from there to here"),
    ],
)
def test_blocked_udp_is_named_with_its_way_after_five_seconds(
    seen: int, peer_seen: int, says: str
) -> None:
    check = make_check()
    if seen:
        check.receive_ping(seen)
    if peer_seen:
        check.receive_seen_untrusted(peer_seen)
    for _ in range(1000):
        check.due_pings(14.98)

    assert check.handle_timer(14.999) is None
    error = check.handle_timer(15.0)

    assert isinstance(error, UnreachableError)
    assert says in str(error)
    assert "UDP to the server at 10.0.0.1 port 5" in str(error)


def test_a_shorter_timeout_ends_the_check_earlier() -> None:
    check = make_check(timeout_s=2.0)
    check.due_pings(11.99)

    assert check.timer() == 12.0
    assert check.handle_timer(12.0) is not None


def test_a_check_that_works_both_ways_has_no_deadline_left() -> None:
    check = make_check(timeout_s=2.0)
    check.receive_ping(548)
    check.receive_seen_untrusted(548)
    check.due_pings(12.5)

    assert check.handle_timer(12.5) is None
    assert check.timer() == 12.52

"""The ranks of a mesh meet, gather bytes and part."""

from typing import Any

import msgspec
import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import (
    HandshakeError,
    PeerLostError,
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
    UnreachableError,
)
from tailbound.protocol.events import Ended, Gathered, Started
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Bye,
    GatherPart,
    MeshHello,
    Message,
    Nudge,
    PingSeen,
    Ready,
    Refuse,
    ShardBegin,
)
from tailbound.protocol.wire import decode_control_untrusted, encode_control
from tailbound.testing import FakeMesh

EXACT = LossBound.fixed(0.0)
HELLO = MeshHello(1, 1, 2, "little", 1, EXACT, 1500, 40000, 1 << 20)


def started(world_size: int = 3, **options: Any) -> FakeMesh:
    net = FakeMesh(world_size, EXACT, **options)
    net.start()
    return net


def tell(net: FakeMesh, source: int, target: int, message: Message) -> None:
    net.ranks[target].receive_control(source, encode_control(message), net.now)


def error_of(net: FakeMesh, rank: int) -> TailboundError:
    error = net.ranks[rank].error
    assert error is not None
    return error


def stranger(net: FakeMesh) -> Link:
    """Somebody connects to rank 0, as link 9."""
    link = Link(-1, "a new connection", "fake 9", udp_port=9)
    net.ranks[0].accept(9, link)
    return link


def said(link: Link) -> list[Message]:
    """What waits to be sent on a link, as the other end would read it."""
    return [
        decode_control_untrusted(encode_control(message)[4:])
        for message in link.control
    ]


# -- meeting ---------------------------------------------------------------------------


def test_all_ranks_start_with_the_size_that_all_links_carry() -> None:
    net = FakeMesh(4, EXACT, mtu=9000, max_datagram_bytes=1300)

    events = net.start()

    assert events == [Started(4, 1208)] * 4  # the ping of 1232 bytes came through


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sessions": [5, 5, 6]}, "session differs: 5 (rank"),
        (
            {"bound": [EXACT, EXACT, LossBound.fixed(0.5)]},
            "give every rank the same LossBound",
        ),
    ],
)
def test_ranks_that_do_not_agree_all_end_with_both_values(
    options: dict[str, Any], message: str
) -> None:
    net = FakeMesh(3, **{"bound": EXACT, **options})

    with pytest.raises(HandshakeError) as caught:
        net.run_until(Started, ranks=[2])

    assert message in str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    net = FakeMesh(3, EXACT, absent=[2], timeout_s=10.0)

    with pytest.raises(PeerLostError, match="rank 2") as caught:
        net.start()

    assert caught.value.peers == ("rank 2",)


def test_a_stranger_that_said_nothing_is_dropped_at_the_start() -> None:
    net = FakeMesh(2, EXACT)
    stranger(net)

    net.run_until(Started)

    assert net.ranks[0].dropped == [9]


def test_udp_that_is_blocked_is_found_before_training() -> None:
    net = FakeMesh(2, EXACT, timeout_s=60.0)
    net.cut_udp(0, [1])

    with pytest.raises(UnreachableError, match="no datagram came"):
        net.start()


def test_what_comes_from_a_rank_that_has_started_waits_until_we_have() -> None:
    net = FakeMesh(2, EXACT)
    early = ShardBegin(1, 0, 1, True, "float32", 4, 1, 1.0, None, 1.0, 1.0, 1)
    tell(net, 0, 1, early)
    assert net.ranks[1].error is None

    net.run_until(Started, ranks=[1])
    tell(net, 0, 1, early)

    assert "ShardBegin twice" in str(error_of(net, 1))


# -- strangers ---------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff" * 8, encode_control(Bye())])
def test_a_stranger_that_talks_nonsense_costs_only_its_own_link(data: bytes) -> None:
    net = FakeMesh(2, EXACT)
    stranger(net)

    net.ranks[0].receive_control(9, data, 0.0)
    net.ranks[0].receive_control(9, data, 0.0)
    net.ranks[0].lose_link(9, "gone", 0.0)

    assert net.ranks[0].dropped == [9]
    net.start()


def test_a_stranger_that_says_nothing_and_leaves_is_forgotten() -> None:
    net = FakeMesh(2, EXACT)
    stranger(net)

    net.ranks[0].receive_control(9, b"\0\0", 0.0)
    net.ranks[0].lose_link(9, "gone", 0.0)

    assert net.ranks[0].dropped == [9]


def test_a_process_of_another_job_is_refused_and_ends_nothing() -> None:
    net = FakeMesh(2, EXACT)
    link = stranger(net)

    hello = msgspec.structs.replace(HELLO, session=99)
    net.ranks[0].receive_control(9, encode_control(hello), 0.0)

    (refusal,) = said(link)
    assert isinstance(refusal, Refuse)
    assert refusal.field == "session"
    net.start()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_taken_ends_the_job_before_the_start(rank: int) -> None:
    net = FakeMesh(2, EXACT)
    net.turn()
    stranger(net)

    hello = msgspec.structs.replace(HELLO, rank=rank)
    net.ranks[0].receive_control(9, encode_control(hello), net.now)

    assert f"rank differs: {rank} is taken (rank 0) here" in str(error_of(net, 0))


def test_a_rank_that_is_taken_does_not_end_a_running_job() -> None:
    net = started(2)
    link = stranger(net)

    net.ranks[0].receive_control(9, encode_control(HELLO), net.now)

    assert isinstance(said(link)[0], Refuse)
    assert net.ranks[0].error is None


def test_an_acceptor_of_another_rank_breaks_the_protocol() -> None:
    net = FakeMesh(3, EXACT)

    tell(net, 0, 2, msgspec.structs.replace(HELLO, rank=1, world_size=3))

    assert "rank 1 where rank 0 was" in str(error_of(net, 2))


def test_an_acceptor_that_does_not_agree_ends_the_job() -> None:
    net = FakeMesh(2, EXACT)

    tell(net, 0, 1, msgspec.structs.replace(HELLO, rank=0, version=7))

    assert "protocol version differs" in str(error_of(net, 1))


@pytest.mark.parametrize(
    "message", [HELLO, Ready(1448, 1 << 20), Ready(1, 1), Refuse("a", "b", "c", "d")]
)
def test_what_belongs_to_the_meeting_ends_a_running_job(message: Message) -> None:
    net = started(2)

    tell(net, 1, 0, message)

    assert isinstance(error_of(net, 0), PeerProtocolError | HandshakeError)


def test_a_size_that_cannot_be_ends_the_meeting() -> None:
    net = FakeMesh(2, EXACT)
    net.turn()

    tell(net, 0, 1, Ready(1, 1))

    assert "payload of 1 bytes" in str(error_of(net, 1))


def test_a_flood_before_the_start_is_not_kept() -> None:
    net = FakeMesh(2, EXACT)
    early = GatherPart(0, 1, 0, b"x")
    begin = ShardBegin(1, 0, 1, True, "float32", 4, 1, 1.0, None, 1.0, 1.0, 1)
    data = encode_control(begin) * 8193

    tell(net, 0, 1, early)
    net.ranks[1].receive_control(0, data, 0.0)

    assert "a flood" in str(error_of(net, 1))


def test_a_word_about_pings_before_the_hello_is_ignored() -> None:
    net = FakeMesh(2, EXACT)

    tell(net, 0, 1, PingSeen(1472))

    assert net.ranks[1].error is None
    net.start()


def test_a_nudge_means_nothing() -> None:
    net = started(2)

    tell(net, 1, 0, Nudge())

    assert net.ranks[0].error is None


# -- gathers ------------------------------------------------------------------------


def test_bytes_are_gathered_in_rank_order() -> None:
    net = started(3)

    events = net.all_gather([b"a", b"", b"c" * 3_000_000])

    assert events == [Gathered((b"a", b"", b"c" * 3_000_000))] * 3


def test_a_part_may_come_before_we_join() -> None:
    net = started(2)
    net.ranks[1].all_gather(b"early", net.now)
    net.run_for(0.1)

    net.ranks[0].all_gather(b"late", net.now)

    assert net.run_until(Gathered) == [Gathered((b"late", b"early"))] * 2


def test_a_rank_that_does_not_join_a_gather_is_named() -> None:
    net = started(3, timeout_s=10.0)
    for rank in (0, 1):
        net.ranks[rank].all_gather(b"x", net.now)

    with pytest.raises(RoundTimeoutError, match=r"rank 2.*an all-gather"):
        net.run_until(Gathered, ranks=[0])


def test_a_part_in_anothers_name_breaks_the_protocol() -> None:
    net = started(3)

    tell(net, 1, 0, GatherPart(2, 1, 0, b"x"))

    assert "a gather part of rank 2" in str(error_of(net, 0))


# -- goodbye ------------------------------------------------------------------------


def test_all_ranks_end_when_all_have_said_goodbye() -> None:
    net = started(3)

    assert net.close() == [Ended()] * 3


def test_a_rank_may_leave_before_the_others() -> None:
    net = started(3)
    net.ranks[0].close()
    net.ranks[0].close()
    net.run_until(Ended, ranks=[0])
    for rank in (1, 2):
        net.ranks[rank].lose_link(0, "its connection closed", net.now)

    net.ranks[1].close()
    net.ranks[2].close()

    net.run_until(Ended, ranks=[1, 2])
    assert all(rank.error is None for rank in net.ranks)


def test_an_answer_that_a_closed_connection_swallowed_is_not_awaited() -> None:
    net = started(2)
    net.ranks[0].close()

    net.ranks[0].lose_link(1, "its connection closed", net.now)

    assert isinstance(net.ranks[0].next_event(), Ended)


def test_a_rank_that_left_is_missed_in_the_next_round() -> None:
    net = started(3)
    net.ranks[2].close()
    net.run_until(Ended, ranks=[2])

    net.begin([np.ones(4, np.float32)] * 3, [1.0] * 3, ranks=[0, 1])

    for rank in (0, 1):
        error = error_of(net, rank)
        assert isinstance(error, PeerLostError)
        assert error.peers == ("rank 2",)


def test_a_rank_that_leaves_is_missed_in_the_open_gather() -> None:
    net = started(3)
    net.ranks[0].all_gather(b"x", net.now)
    net.ranks[2].close()

    with pytest.raises(PeerLostError, match="rank 2"):
        net.run_until(Gathered, ranks=[0])


def test_a_rank_may_leave_while_we_wait_for_third_ones() -> None:
    net = started(3)
    net.ranks[0].all_gather(b"a", net.now)
    net.ranks[2].all_gather(b"c", net.now)
    tell(net, 1, 2, GatherPart(1, 1, 0, b"b"))  # rank 1's word is late at rank 0
    net.run_for(0.1)
    net.ranks[2].close()
    net.run_for(0.1)

    assert net.ranks[0].error is None
    tell(net, 1, 0, GatherPart(1, 1, 0, b"b"))
    assert net.run_until(Gathered, ranks=[0]) == [Gathered((b"a", b"b", b"c"))]


def test_goodbye_before_the_start_is_no_goodbye() -> None:
    net = FakeMesh(2, EXACT)

    net.ranks[0].close()
    net.run_until(Started, ranks=[1])

    assert net.ranks[0].error is None


def test_who_has_failed_says_no_goodbye() -> None:
    net = started(2)
    net.ranks[0].fail(TailboundError("enough"))

    net.ranks[0].close()

    words = said(net.ranks[0].links[1])
    assert not any(isinstance(word, Bye) for word in words)

"""What each error says, whose family it is, and that it survives pickling."""

import copy
import pickle

import pytest

from tailbound.errors import (
    ConfigError,
    HandshakeError,
    JobClosedError,
    MissingExtraError,
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    RoundTimeoutError,
    ShapeError,
    TailboundError,
    UnreachableError,
    WireError,
)

HANDSHAKE = HandshakeError("mtu", "1500", "9000", "set Transport(mtu=...)")
UNREACHABLE = UnreachableError("UDP", "rank 2", "10.0.0.2:7000", "open the port")
LOST = PeerLostError(("rank 1", "rank 2"), "step 7", "connection reset")
PROTOCOL = PeerProtocolError("rank 1", "WAITING", "a stop")
TIMEOUT = RoundTimeoutError("rank 3", "round 9", 4, 100, 60.04)
REMOTE = RemoteError("rank 0", "disk full")

ALL = [
    ConfigError("p_low is a share"),
    ShapeError("sum is (2,)"),
    WireError("short header"),
    MissingExtraError("pip install tailbound[demo]"),
    JobClosedError("the job is closed"),
    HANDSHAKE,
    UNREACHABLE,
    LOST,
    PROTOCOL,
    TIMEOUT,
    REMOTE,
]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HANDSHAKE, "mtu differs: 1500 here, 9000 there; set Transport(mtu=...)"),
        (
            UNREACHABLE,
            "UDP to rank 2 at 10.0.0.2:7000 does not get through; open the port",
        ),
        (
            LOST,
            "lost rank 1, rank 2 during step 7 (connection reset); "
            "see that process's own output, then restart the job",
        ),
        (
            PROTOCOL,
            "rank 1 sent a stop while we were WAITING; "
            "do all ranks run the same tailbound version?",
        ),
        (
            TIMEOUT,
            "rank 3 did not finish round 9 within 60.0 s (4 of 100 chunks missing); "
            "raise Transport(timeout_s=...) if it is only slow",
        ),
        (REMOTE, "rank 0 ended the job: disk full"),
    ],
)
def test_message_is_one_line_that_names_what_is_wrong_and_what_to_do(
    error: TailboundError, text: str
) -> None:
    assert str(error) == text


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_error_survives_pickling_and_copying(error: Exception) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_attributes_hold_what_the_message_says() -> None:
    assert (HANDSHAKE.field, HANDSHAKE.ours, HANDSHAKE.theirs) == (
        "mtu",
        "1500",
        "9000",
    )
    assert (UNREACHABLE.protocol, UNREACHABLE.address) == ("UDP", "10.0.0.2:7000")
    assert (LOST.peers, LOST.reason) == (("rank 1", "rank 2"), "connection reset")
    assert (PROTOCOL.state, PROTOCOL.got) == ("WAITING", "a stop")
    assert (TIMEOUT.missing, TIMEOUT.chunks, TIMEOUT.waited_s) == (4, 100, 60.04)
    assert (REMOTE.peer, REMOTE.message) == ("rank 0", "disk full")


@pytest.mark.parametrize("error", [UNREACHABLE, LOST, TIMEOUT])
def test_what_is_an_os_error_claims_no_errno_and_no_file(error: OSError) -> None:
    assert error.errno is None
    assert error.filename is None


def test_mistakes_of_the_caller_are_value_errors_and_the_worlds_are_not() -> None:
    caller = [type(error) for error in ALL if isinstance(error, ValueError)]
    world = [type(error) for error in ALL if isinstance(error, TailboundError)]

    assert caller == [ConfigError, ShapeError]
    assert len(caller) + len(world) == len(ALL)


def test_errors_are_caught_by_the_builtin_names_people_use() -> None:
    assert isinstance(UNREACHABLE, ConnectionError)
    assert isinstance(LOST, ConnectionError)
    assert isinstance(TIMEOUT, TimeoutError)

"""The gate before a control connection opens to who knows the secret alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.protocol.messages import Bye
from tailbound.protocol.wire import encode_control
from tailbound.security.gate import GREETING_BYTES, MAGICS, Gate

SECRET = b"correct horse battery"
NONCES = bytes(range(32)), bytes(range(32, 64))


def pair(secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> tuple[Gate, Gate]:
    """The end that connects, and the one that accepts."""
    connecting = Gate(secrets[0], NONCES[0], is_connecting=True)
    accepting = Gate(secrets[1], NONCES[1], is_connecting=False)
    return connecting, accepting


def take(gate: Gate) -> bytes:
    """What it has to send."""
    data = bytes(gate.outgoing)
    gate.outgoing.clear()
    return data


def meet(first: Gate, second: Gate) -> None:
    """Carry all that both say."""
    while first.outgoing or second.outgoing:
        second.feed_untrusted(take(first))
        first.feed_untrusted(take(second))


def test_two_that_know_the_secret_let_each_other_through() -> None:
    first, second = pair()

    meet(first, second)

    assert first.is_open
    assert second.is_open


def test_a_greeting_and_a_proof_are_72_bytes() -> None:
    first, second = pair()
    unasked, greeting = take(second), take(first)

    second.feed_untrusted(greeting)
    answer = take(second)
    first.feed_untrusted(answer)

    assert unasked == b""
    assert greeting == b"\xfftbgate1" + NONCES[0]
    assert answer[:40] == b"\xfftbgate1" + NONCES[1]
    assert (len(answer), len(take(first))) == (72, 32)


@pytest.mark.parametrize("secrets", [(SECRET, b"another"), (b"another", SECRET)])
def test_another_secret_opens_neither(secrets: tuple[bytes, bytes]) -> None:
    first, second = pair(secrets)

    meet(first, second)

    assert (first.is_open, second.is_open) == (False, False)
    assert (first.has_failed, second.has_failed) == (True, True)


def test_what_follows_the_proof_goes_through() -> None:
    first, second = pair()
    second.feed_untrusted(take(first))
    answer = take(second)

    assert first.feed_untrusted(answer[:71]) == b""
    assert first.feed_untrusted(answer[71:] + b"hello") == b"hello"


@given(cuts=st.lists(st.integers(1, 71), max_size=5))
def test_however_the_bytes_are_cut(cuts: list[int]) -> None:
    first, second = pair()
    second.feed_untrusted(take(first))
    data = take(second) + b"hello"

    passed = b""
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        passed += first.feed_untrusted(data[start:stop])

    assert first.is_open
    assert passed == b"hello"


def test_a_peer_without_a_secret_is_told_by_its_first_bytes() -> None:
    """A control message begins with its length, which is never that large."""
    first, _ = pair()

    assert first.feed_untrusted(encode_control(Bye())) == b""

    assert first.has_failed
    assert first.feed_untrusted(b"more") == b""


def test_our_own_words_sent_back_open_nothing() -> None:
    first, _ = pair()

    first.feed_untrusted(take(first))

    assert first.has_failed
    assert take(first) == b""


def test_a_proof_of_another_connection_opens_nothing() -> None:
    """Whoever overheard it has no use for it: our nonce is another one."""
    first, second = pair()
    second.feed_untrusted(take(first))
    overheard = take(second)
    later = Gate(SECRET, bytes(range(64, 96)), is_connecting=True)

    later.feed_untrusted(overheard)

    assert later.has_failed


def test_the_proof_of_the_same_end_opens_nothing() -> None:
    """Both claim to have connected: a proof says which end made it."""
    first = Gate(SECRET, NONCES[0], is_connecting=True)
    second = Gate(SECRET, NONCES[1], is_connecting=True)

    meet(first, second)

    assert (first.has_failed, second.has_failed) == (True, True)


@given(data=st.binary(max_size=200))
def test_no_other_bytes_open_it(data: bytes) -> None:
    first, _ = pair()

    assert first.feed_untrusted(data) == b""
    assert not first.is_open


@given(tail=st.binary(min_size=64, max_size=100))
def test_no_other_bytes_after_its_name_open_it(tail: bytes) -> None:
    first, _ = pair()

    assert first.feed_untrusted(MAGICS["session"] + tail) == b""
    assert first.has_failed
    assert len(MAGICS["session"]) + 32 == GREETING_BYTES

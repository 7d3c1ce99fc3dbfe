"""One round's sender: batches out, bitmaps in."""

import itertools

import numpy as np
import pytest

from tailbound.errors import (
    PeerProtocolError,
    RoundTimeoutError,
    UnreachableError,
    WireError,
)
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import Bitmap, Mark, MarkSeen, Probe, Stop
from tailbound.protocol.repair import Repair
from tailbound.protocol.sender import TRANSITIONS, Sender, SenderState

KEY = RoundKey(7, 2, Direction.IN)
NAMES = (7, 2, Direction.IN)
TEN = ChunkLayout(10, itemsize=4, room_bytes=4)
"""Ten chunks of one float32; a datagram has 28 bytes."""
NOTHING, ALL_BUT_3, ALL = b"\x00\x00", b"\xef\xc0", b"\xff\xc0"


def make_sender(
    layout: ChunkLayout = TEN,
    order: list[int] | None = None,
    *,
    now: float = 0.0,
    window_bytes: int = 1 << 20,
    timeout_s: float = 60.0,
    silence_s: float = 5.0,
    repair: Repair | None = None,
) -> Sender:
    return Sender(
        KEY,
        layout,
        np.array(order or range(layout.num_chunks), dtype=np.int64),
        peer="the server",
        now=now,
        window_bytes=window_bytes,
        timeout_s=timeout_s,
        silence_s=silence_s,
        repair=repair,
    )


def send_all(sender: Sender, now: float = 0.0) -> list[int]:
    """Take every chunk that may leave, and the control messages behind them."""
    chunks: list[int] = []
    while (batch_K := sender.next_chunks(now, 64, 65535)) is not None:
        chunks += batch_K.tolist()
    while sender.next_control() is not None:
        pass
    return chunks


def bitmap(bits: bytes) -> Bitmap:
    return Bitmap(*NAMES, bits)


# -- transitions ---------------------------------------------------------------


def test_the_transitions_are_these() -> None:
    sending, waiting, stopped = SenderState
    expected = {
        (sending, "all handed over"): waiting,
        (sending, "stop"): stopped,
        (waiting, "bitmap"): sending,
        (waiting, "stop"): stopped,
    }
    assert expected == TRANSITIONS


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(SenderState, ("bitmap", "stop")))
)
def test_an_answer_does_what_the_table_says_or_raises_and_changes_nothing(
    state: SenderState, event: str
) -> None:
    sender = make_sender()
    if state is not SenderState.SENDING:
        send_all(sender)
    if state is SenderState.STOPPED:
        sender.receive_untrusted(Stop(*NAMES, ALL), 1.0)
    assert sender.state is state
    answer = bitmap(ALL_BUT_3) if event == "bitmap" else Stop(*NAMES, ALL)
    before = sender.statistics()

    if (state, event) in TRANSITIONS:
        sender.receive_untrusted(answer, 2.0)
        assert sender.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(PeerProtocolError) as caught:
            sender.receive_untrusted(answer, 2.0)
        assert caught.value.peer == "the server"
        assert caught.value.state == state.value
        assert caught.value.got == f"a {event}"
        assert sender.state is state
        assert sender.statistics() == before


def test_a_second_stop_does_not_change_what_the_first_said() -> None:
    sender = make_sender()
    sender.receive_untrusted(Stop(*NAMES, ALL_BUT_3), 1.0)
    before = sender.statistics()
    assert before.early_stop

    with pytest.raises(PeerProtocolError):
        sender.receive_untrusted(Stop(*NAMES, NOTHING), 2.0)

    assert sender.statistics() == before


@pytest.mark.parametrize("state", SenderState)
def test_chunks_are_handed_over_only_while_sending(state: SenderState) -> None:
    sender = make_sender()
    if state is not SenderState.SENDING:
        send_all(sender)
    if state is SenderState.STOPPED:
        sender.receive_untrusted(Stop(*NAMES, ALL), 1.0)

    assert sender.has_chunks(2.0) is (state is SenderState.SENDING)
    batch_K = sender.next_chunks(2.0, 64, 65535)

    if state is SenderState.SENDING:
        assert batch_K is not None
        assert len(batch_K) == 10
        assert sender.state is TRANSITIONS[state, "all handed over"]
    else:
        assert batch_K is None
        assert sender.state is state


def test_a_bitmap_that_shows_everything_is_an_error_since_that_is_a_stop() -> None:
    sender = make_sender()
    send_all(sender)

    with pytest.raises(PeerProtocolError, match="a complete bitmap") as caught:
        sender.receive_untrusted(bitmap(ALL), 1.0)

    assert caught.value.state == "waiting for a bitmap"
    assert sender.state is SenderState.WAITING


@pytest.mark.parametrize("bits", [b"", b"\xff", b"\xff\xff\xff"])
def test_a_bitmap_of_another_bucket_changes_nothing(bits: bytes) -> None:
    sender = make_sender()
    send_all(sender)

    for message in (bitmap(bits), Stop(*NAMES, bits)):
        with pytest.raises(WireError, match="10 chunks"):
            sender.receive_untrusted(message, 1.0)
    assert sender.state is SenderState.WAITING


# -- sending -------------------------------------------------------------------


def test_chunks_leave_in_the_given_order_and_a_probe_follows_the_last() -> None:
    sender = make_sender(order=[3, 4, 5, 6, 7, 8, 9, 0, 1, 2])

    first_K = sender.next_chunks(0.0, 6, 65535)
    assert first_K is not None
    assert first_K.tolist() == [3, 4, 5, 6, 7, 8]
    assert sender.next_control() is None

    second_K = sender.next_chunks(0.0, 6, 65535)
    assert second_K is not None
    assert second_K.tolist() == [9, 0, 1, 2]
    assert sender.next_control() == Probe(*NAMES)
    assert sender.next_control() is None


@pytest.mark.parametrize(
    ("max_chunks", "max_bytes", "expected"),
    [(3, 65535, 3), (64, 56, 2), (64, 55, 1), (64, 28, 1), (1, 28, 1)],
)
def test_a_batch_is_as_large_as_both_limits_allow(
    max_chunks: int, max_bytes: int, expected: int
) -> None:
    batch_K = make_sender().next_chunks(0.0, max_chunks, max_bytes)

    assert batch_K is not None
    assert len(batch_K) == expected


@pytest.mark.parametrize(("max_chunks", "max_bytes"), [(0, 65535), (64, 27)])
def test_no_batch_leaves_if_not_one_chunk_fits(max_chunks: int, max_bytes: int) -> None:
    sender = make_sender()

    assert sender.next_chunks(0.0, max_chunks, max_bytes) is None
    assert sender.statistics().sent == 0


def test_a_short_last_chunk_ends_its_batch() -> None:
    layout = ChunkLayout(7, itemsize=4, room_bytes=8)  # three full ones and a short
    sender = make_sender(layout, [2, 3, 0, 1])

    batches = [sender.next_chunks(0.0, 64, 65535) for _ in range(3)]

    assert [None if b is None else b.tolist() for b in batches] == [
        [2, 3],
        [0, 1],
        None,
    ]


def test_only_what_the_bitmap_shows_missing_is_sent_again_in_the_same_order() -> None:
    sender = make_sender(order=[5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    send_all(sender)

    sender.receive_untrusted(bitmap(b"\xb5\x40"), 1.0)  # 1, 4, 6, 8 missing

    assert send_all(sender, 1.0) == [6, 8, 1, 4]


def test_a_burst_is_repaired_with_copies_one_after_the_other() -> None:
    """19 elements are ten chunks, the last one short; it ends a batch each time."""
    layout = ChunkLayout(19, itemsize=2, room_bytes=4)
    sender = make_sender(layout, repair=Repair())
    assert send_all(sender) == list(range(10))

    # 4 and 9 are missing, at most one may be: 2 * 0.2**2 would be enough.
    sender.receive_untrusted(Bitmap(*NAMES, b"\xf7\x80", allowed=1), now=0.0)

    batches = []
    while (batch_K := sender.next_chunks(0.0, 64, 65535)) is not None:
        batches.append(batch_K.tolist())
    assert batches == [[4, 9], [4, 9]]
    assert sender.statistics().retransmitted == 4


def test_an_answer_may_not_allow_more_than_there_is() -> None:
    sender = make_sender(repair=Repair())
    send_all(sender)

    sender.receive_untrusted(Bitmap(*NAMES, NOTHING, allowed=-(2**40)), now=0.0)

    assert send_all(sender) == list(range(10))


def test_a_stop_while_sending_is_an_early_stop() -> None:
    sender = make_sender()
    sender.next_chunks(1.0, 4, 65535)

    sender.receive_untrusted(Stop(*NAMES, b"\xf0\x00"), 1.5)

    statistics = sender.statistics()
    assert statistics.early_stop
    assert (statistics.sent, statistics.missing, statistics.probes) == (4, 6, 0)
    assert (statistics.latency_s, statistics.waiting_s) == (0.5, 0.0)


def test_a_stop_drops_the_control_messages_that_were_still_to_leave() -> None:
    sender = make_sender()
    sender.next_chunks(0.0, 64, 65535)

    sender.receive_untrusted(Stop(*NAMES, ALL), 1.0)

    assert sender.next_control() is None


def test_a_stop_while_waiting_is_no_early_stop() -> None:
    sender = make_sender()
    send_all(sender)

    sender.receive_untrusted(Stop(*NAMES, ALL_BUT_3), 1.0)

    assert not sender.statistics().early_stop
    assert sender.statistics().missing == 1


def test_the_statistics_tell_passes_repairs_and_round_trips() -> None:
    sender = make_sender(now=1.0)
    send_all(sender, 2.0)  # the first pass: 10
    sender.receive_untrusted(bitmap(b"\x0f\xc0"), 2.5)  # waited 0.5; 4 missing
    send_all(sender, 2.5)
    sender.receive_untrusted(bitmap(ALL_BUT_3), 3.25)  # waited 0.75; 1 missing
    send_all(sender, 3.5)
    sender.receive_untrusted(Stop(*NAMES, ALL), 3.75)  # waited 0.25

    statistics = sender.statistics()
    assert statistics.sends == 3
    assert statistics.probes == 3
    assert statistics.sent == 15
    assert statistics.retransmitted == 5
    assert statistics.missing == 0
    assert statistics.latency_s == 1.75
    assert statistics.waiting_s == 1.5
    assert not statistics.early_stop


def test_a_round_that_sent_nothing_yet_has_no_latency() -> None:
    assert make_sender(now=1.0).statistics().latency_s == 0.0


def test_a_stop_without_any_chunk_is_refused() -> None:
    """Total loss is within no bound, so no honest receiver stops there."""
    sender = make_sender(now=1.0)

    with pytest.raises(PeerProtocolError, match="an empty stop"):
        sender.receive_untrusted(Stop(*NAMES, NOTHING), 3.0)

    assert sender.state is SenderState.SENDING


# -- the window ----------------------------------------------------------------

HUNDRED = ChunkLayout(100 * 244, itemsize=4, room_bytes=976)
"""A hundred datagrams of 1000 bytes."""


def test_a_full_window_stops_the_sender_until_a_mark_comes_back() -> None:
    sender = make_sender(HUNDRED, window_bytes=80_000)

    first_K = sender.next_chunks(0.0, 64, 65535)
    assert first_K is not None
    assert len(first_K) == 64
    assert sender.next_control() == Mark(*NAMES, 64_000)
    second_K = sender.next_chunks(0.0, 64, 65535)
    assert second_K is not None
    assert len(second_K) == 16
    assert sender.next_control() is None
    assert not sender.has_chunks(0.0)
    assert sender.next_chunks(0.0, 64, 65535) is None

    sender.receive_untrusted(MarkSeen(*NAMES, 64_000), 1.0)

    assert sender.has_chunks(1.0)
    third_K = sender.next_chunks(1.0, 64, 65535)
    assert third_K is not None
    assert third_K.tolist() == list(range(80, 100))
    assert sender.next_control() == Probe(*NAMES)


def test_a_bitmap_says_that_all_sent_so_far_has_left_the_way() -> None:
    sender = make_sender(HUNDRED, window_bytes=100_000)
    assert len(send_all(sender)) == 100
    assert sender.window.room_bytes == 0

    sender.receive_untrusted(bitmap(bytes(13)), 1.0)

    assert sender.window.room_bytes == 100_000


def test_a_negative_mark_is_refused() -> None:
    sender = make_sender()

    with pytest.raises(WireError, match="mark of -1 bytes"):
        sender.receive_untrusted(MarkSeen(*NAMES, -1), 1.0)


def test_a_mark_that_comes_back_after_the_stop_is_taken() -> None:
    sender = make_sender()
    send_all(sender)
    sender.receive_untrusted(Stop(*NAMES, ALL), 1.0)

    sender.receive_untrusted(MarkSeen(*NAMES, 280), 1.0)

    assert sender.state is SenderState.STOPPED


# -- deadlines -----------------------------------------------------------------


def test_the_deadline_is_just_reached_or_just_not() -> None:
    sender = make_sender(now=2.0, timeout_s=8.0)
    send_all(sender, 2.0)
    sender.receive_untrusted(bitmap(ALL_BUT_3), 3.0)

    assert sender.timer() == 10.0
    assert sender.handle_timer(9.999) is None
    error = sender.handle_timer(10.0)

    assert isinstance(error, RoundTimeoutError)
    assert (error.peer, error.missing, error.chunks) == ("the server", 1, 10)
    assert error.waited_s == 8.0
    assert error.phase == "the gradient of round 7, bucket 2"


def test_a_stopped_sender_has_no_deadline() -> None:
    sender = make_sender(timeout_s=8.0)
    sender.receive_untrusted(Stop(*NAMES, ALL), 1.0)

    assert sender.timer() is None
    assert sender.handle_timer(100.0) is None


def answer_with_nothing_new(sender: Sender, now: float) -> None:
    """One repair that brings nothing."""
    assert send_all(sender, now)
    sender.receive_untrusted(bitmap(NOTHING), now)


def test_repairs_that_bring_nothing_slow_down_after_eight() -> None:
    sender = make_sender(silence_s=60.0)
    for _ in range(8):
        answer_with_nothing_new(sender, 0.0)
        assert sender.timer() == 60.0
        assert sender.has_chunks(0.0)

    now = 0.0
    pauses = []
    for _ in range(7):
        answer_with_nothing_new(sender, now)
        due_s = sender.timer()
        assert due_s is not None
        pauses.append(round(due_s - now, 9))
        assert not sender.has_chunks(now)
        assert sender.next_chunks(now, 64, 65535) is None
        now = due_s
        assert sender.has_chunks(now)

    assert pauses == [0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]


def test_one_new_chunk_ends_the_slow_pace() -> None:
    sender = make_sender()
    for _ in range(9):
        answer_with_nothing_new(sender, 0.0)
    send_all(sender, 1.0)

    sender.receive_untrusted(bitmap(b"\x10\x00"), 1.0)

    assert sender.has_chunks(1.0)
    assert sender.timer() == 60.0


def test_a_pause_that_is_over_is_no_longer_what_the_timer_names() -> None:
    """A driver would spin if the window is full once the pause is over."""
    sender = make_sender()
    for _ in range(9):
        answer_with_nothing_new(sender, 0.0)
    assert sender.timer() == 0.002

    assert sender.handle_timer(0.001) is None
    assert sender.timer() == 0.002
    assert sender.handle_timer(0.002) is None

    assert sender.timer() == 60.0
    assert sender.has_chunks(0.002)


def test_progress_leaves_no_time_in_the_past_to_a_sender_with_a_full_window() -> None:
    sender = make_sender(HUNDRED, window_bytes=1)
    while sender.has_chunks(1.0):
        send_all(sender, 1.0)
        sender.receive_untrusted(MarkSeen(*NAMES, sender.window.sent_bytes), 1.0)
    sender.receive_untrusted(bitmap(b"\x80" + bytes(12)), 2.0)
    assert len(send_all(sender, 2.0)) == 65

    assert sender.state is SenderState.SENDING
    assert not sender.has_chunks(3.0)
    assert sender.timer() == 60.0


def test_the_deadline_comes_before_a_pause_that_ends_later() -> None:
    sender = make_sender(timeout_s=1.0)
    for _ in range(9):
        answer_with_nothing_new(sender, 0.999)

    assert sender.timer() == 1.0


def idle_until(now: float, *, repairs: int, progress_s: float | None = None) -> Sender:
    """A sender with silence_s 5 whose last answer, at ``now``, brought nothing."""
    sender = make_sender(silence_s=5.0)
    bits = NOTHING
    if progress_s is not None:
        bits = b"\x80\x00"
        send_all(sender, 0.0)
        sender.receive_untrusted(bitmap(bits), progress_s)
    for _ in range(repairs - 1):
        send_all(sender, progress_s or 0.0)
        sender.receive_untrusted(bitmap(bits), progress_s or 0.0)
    send_all(sender, now)
    sender.receive_untrusted(bitmap(bits), now)
    return sender


def test_udp_that_brings_nothing_for_silence_s_may_still_be_slow() -> None:
    assert idle_until(5.0, repairs=9).state is SenderState.SENDING


def test_udp_that_brings_nothing_for_longer_is_dead() -> None:
    with pytest.raises(UnreachableError, match=r"5\.5 s while TCP works") as caught:
        idle_until(5.5, repairs=9)

    assert (caught.value.protocol, caught.value.peer) == ("UDP", "the server")


def test_eight_repairs_without_a_chunk_are_no_silence_however_long() -> None:
    assert idle_until(50.0, repairs=8).state is SenderState.SENDING


def test_silence_counts_from_the_last_new_chunk() -> None:
    assert idle_until(9.0, repairs=9, progress_s=4.0).state is SenderState.SENDING

    with pytest.raises(UnreachableError, match=r"for 5\.5 s"):
        idle_until(9.5, repairs=9, progress_s=4.0)

"""One round's receiver: batches in, bitmaps and the stop out."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.errors import RoundTimeoutError, WireError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.deadline import Deadline, FixedDeadline, LearnedDeadline
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import Bitmap, MarkSeen, Stop
from tailbound.protocol.receiver import TRANSITIONS, Receiver, ReceiverState
from tailbound.protocol.sinks import Sink, SumSink
from tailbound.protocol.wire import encode_control
from tailbound.reduction import FORMATS

KEY = RoundKey(7, 2, Direction.IN)
NAMES = (7, 2, Direction.IN)
SEVEN = ChunkLayout(7, itemsize=4, room_bytes=8)
"""Chunks 0, 1, 2 of two float32 and chunk 3 of one."""
F32 = FORMATS["float32"]


def make_receiver(
    values_N: NDArray[Any] | None = None,
    *,
    sink: Sink | None = None,
    layout: ChunkLayout = SEVEN,
    loss_bound: float = 0.0,
    now: float = 0.0,
    timeout_s: float = 60.0,
    window_bytes: int = 1 << 22,
    deadline: Deadline | None = None,
) -> Receiver:
    if sink is None:
        if values_N is None:
            values_N = np.zeros(layout.num_elements, np.float32)
        sink = SumSink(values_N, layout, F32, is_empty=False)
    return Receiver(
        KEY,
        layout,
        sink,
        loss_bound=loss_bound,
        peer="rank 1",
        now=now,
        timeout_s=timeout_s,
        window_bytes=window_bytes,
        deadline=deadline,
    )


def give(receiver: Receiver, *chunks: int) -> None:
    """Full chunks; chunk i holds 10 i + 1 and 10 i + 2."""
    rows = [[10 * chunk + 1, 10 * chunk + 2] for chunk in chunks]
    receiver.receive(np.array(chunks), np.array(rows, np.float32))


def give_run(receiver: Receiver, first: int, num: int) -> None:
    """The same chunks as ``give``, by the way of a batch without holes."""
    rows = [[10 * chunk + 1, 10 * chunk + 2] for chunk in range(first, first + num)]
    receiver.receive_run(first, np.array(rows, np.float32))


def give_tail(receiver: Receiver, num: int = 1) -> None:
    receiver.receive_tail(num, np.array([31], np.float32))


def closed_receiver() -> Receiver:
    receiver = make_receiver()
    give(receiver, 0, 1, 2)
    give_tail(receiver)
    assert receiver.settle(1.0)
    return receiver


# -- transitions ---------------------------------------------------------------


def test_the_transitions_are_these() -> None:
    is_open, closed = ReceiverState
    expected = {
        (is_open, "chunks"): is_open,
        (is_open, "probe"): is_open,
        (is_open, "within the bound"): closed,
        (is_open, "deadline"): closed,
        (closed, "chunks"): closed,
        (closed, "probe"): closed,
    }
    assert expected == TRANSITIONS


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS))
def test_an_input_leads_where_the_table_says(state: ReceiverState, event: str) -> None:
    loss_bound = 0.0 if event == "deadline" else 0.75
    receiver = make_receiver(loss_bound=loss_bound, deadline=FixedDeadline(1.0))
    if state is ReceiverState.CLOSED:
        receiver = closed_receiver()
    if event == "chunks":
        give(receiver, 0)
    elif event == "probe":
        receiver.receive_probe()
    else:
        give(receiver, 0)
        receiver.settle(0.0)
        receiver.settle(1.0)

    assert receiver.state is TRANSITIONS[state, event]


def test_a_closed_receiver_ignores_and_counts() -> None:
    values_N = np.zeros(7, np.float32)
    receiver = make_receiver(values_N, loss_bound=0.5)
    give(receiver, 0, 1)
    assert receiver.settle(1.0)
    assert receiver.next_control() == Stop(*NAMES, b"\xc0")

    give(receiver, 2, 1)
    give_run(receiver, 1, 2)
    give_tail(receiver, 3)
    receiver.receive_probe()
    receiver.receive_mark_untrusted(500)

    assert not receiver.settle(2.0)
    assert receiver.next_control() is None
    assert values_N.tolist() == [1, 2, 11, 12, 0, 0, 0]
    statistics = receiver.statistics()
    assert (statistics.received, statistics.duplicates) == (9, 7)
    assert (statistics.missing, statistics.probes) == (2, 0)


# -- chunks --------------------------------------------------------------------


@pytest.mark.parametrize(
    "batches",
    [
        [(0, 1, 2)],
        [(2, 1, 0)],
        [(1,), (0,), (2,)],
        [(0, 2), (1,)],
        [(2, 0), (0, 1, 2)],
        [(0, 1, 2), (0, 1, 2)],
        [(1, 1, 1), (0, 0, 2, 2)],
        [(0, 1), (1, 2)],
    ],
    ids=str,
)
def test_each_chunk_is_added_once_however_it_comes(
    batches: list[tuple[int, ...]],
) -> None:
    values_N = np.array([100, 0, 0, 0, 0, 0, 200], np.float32)
    receiver = make_receiver(values_N)

    for batch in batches:
        give(receiver, *batch)
    give_tail(receiver)

    assert values_N.tolist() == [101, 2, 11, 12, 21, 22, 231]
    total = sum(len(batch) for batch in batches) + 1
    statistics = receiver.statistics()
    assert statistics.received == total
    assert statistics.duplicates == total - 4
    assert receiver.missing == 0


@pytest.mark.parametrize(
    ("runs", "duplicates"),
    [
        ([(0, 3)], 0),
        ([(1, 2), (0, 1)], 0),
        ([(0, 2), (0, 3)], 2),
        ([(2, 1), (0, 3)], 1),
        ([(0, 3), (0, 3)], 3),
        ([(1, 1), (0, 3), (1, 2)], 3),
    ],
    ids=str,
)
def test_each_chunk_of_overlapping_runs_is_added_once(
    runs: list[tuple[int, int]], duplicates: int
) -> None:
    values_N = np.array([100, 0, 0, 0, 0, 0, 200], np.float32)
    receiver = make_receiver(values_N)

    for first, num in runs:
        give_run(receiver, first, num)

    assert values_N.tolist() == [101, 2, 11, 12, 21, 22, 200]
    assert receiver.missing == 1
    assert receiver.arrived_C.tolist() == [True, True, True, False]
    assert receiver.statistics().duplicates == duplicates


def test_of_two_datagrams_with_one_number_the_first_counts() -> None:
    values_N = np.zeros(7, np.float32)
    receiver = make_receiver(values_N)

    rows_KE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    receiver.receive(np.array([1, 0, 1]), rows_KE)

    assert values_N.tolist() == [3, 4, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 1), (1, 4)])
def test_the_short_chunk_is_added_once(first: int, second: int) -> None:
    values_N = np.zeros(7, np.float32)
    receiver = make_receiver(values_N)

    give_tail(receiver, first)
    give_tail(receiver, second)

    assert values_N.tolist() == [0, 0, 0, 0, 0, 0, 31]
    assert receiver.missing == 3
    assert receiver.statistics().duplicates == first + second - 1


def test_a_bucket_without_a_short_chunk_works() -> None:
    values_N = np.zeros(4, np.float32)
    receiver = make_receiver(values_N, layout=ChunkLayout(4, 4, 8))

    give(receiver, 0, 1)

    assert receiver.settle(1.0)
    assert values_N.tolist() == [1, 2, 11, 12]


def test_a_bucket_that_is_only_a_short_chunk_works() -> None:
    values_N = np.zeros(1, np.float32)
    receiver = make_receiver(values_N, layout=ChunkLayout(1, 4, 8))

    give_tail(receiver)

    assert receiver.settle(1.0)
    assert receiver.next_control() == Stop(*NAMES, b"\x80")
    assert values_N.tolist() == [31]


# -- probes, marks and the stop --------------------------------------------------


def test_a_probe_is_answered_with_the_newest_bitmap() -> None:
    receiver = make_receiver()
    receiver.receive_probe()
    give(receiver, 2)
    receiver.receive_probe()
    give_tail(receiver)
    receiver.receive_probe()

    assert receiver.next_control() == Bitmap(*NAMES, b"\x00")
    assert receiver.next_control() == Bitmap(*NAMES, b"\x20")
    assert receiver.next_control() == Bitmap(*NAMES, b"\x30")
    assert receiver.next_control() is None
    assert receiver.statistics().probes == 3


def test_a_bitmap_says_how_many_chunks_may_be_missing_in_the_end() -> None:
    """0.408 of 4 chunks are 1.6."""
    receiver = make_receiver(loss_bound=0.408)
    receiver.receive_probe()

    assert receiver.next_control() == Bitmap(*NAMES, b"\x00", allowed=1)


def test_a_mark_is_answered_with_what_it_said() -> None:
    receiver = make_receiver()

    receiver.receive_mark_untrusted(12_345)

    assert receiver.next_control() == MarkSeen(*NAMES, 12_345)


@pytest.mark.parametrize("sent_bytes", [-1, (1 << 62) + 1, 2**64 - 1])
def test_a_mark_that_no_sender_can_have_reached_is_refused(sent_bytes: int) -> None:
    receiver = make_receiver()

    with pytest.raises(WireError, match=f"a mark of {sent_bytes} bytes"):
        receiver.receive_mark_untrusted(sent_bytes)


def test_the_largest_mark_and_what_comes_after_it_still_fit_a_message() -> None:
    receiver = make_receiver(window_bytes=8)

    receiver.receive_mark_untrusted(1 << 62)
    give(receiver, 0)

    assert receiver.next_control() == MarkSeen(*NAMES, 1 << 62)
    told = receiver.next_control()
    assert told == MarkSeen(*NAMES, (1 << 62) + 32)
    assert len(encode_control(told)) > 0


def test_each_eighth_of_the_window_that_was_read_is_told_unasked() -> None:
    """A datagram has 32 bytes here; a mark brings the lost ones into the count."""
    receiver = make_receiver(window_bytes=512)
    give(receiver, 0)
    assert receiver.next_control() is None
    give(receiver, 0)  # a duplicate is not new
    assert receiver.next_control() is None

    give_run(receiver, 1, 1)
    assert receiver.next_control() == MarkSeen(*NAMES, 64)
    receiver.receive_mark_untrusted(500)
    assert receiver.next_control() == MarkSeen(*NAMES, 500)
    give(receiver, 2)

    assert receiver.next_control() is None


def test_an_older_mark_takes_nothing_back() -> None:
    receiver = make_receiver()
    receiver.receive_mark_untrusted(500)
    receiver.receive_mark_untrusted(400)

    assert receiver.next_control() == MarkSeen(*NAMES, 500)
    assert receiver.next_control() == MarkSeen(*NAMES, 500)


@pytest.mark.parametrize(
    ("loss_bound", "arrived", "closes"),
    [
        (0.0, (0, 1, 2), False),
        (0.25, (0, 1), False),
        (0.25, (0, 1, 2), True),
        (0.5, (1,), False),
        (0.5, (1, 2), True),
        (0.749, (), False),
        (0.75, (1,), True),
        (0.999, (), False),  # total loss is never within the bound
        (0.999, (1,), True),
    ],
)
def test_a_round_closes_just_when_the_missing_are_within_the_bound(
    loss_bound: float, arrived: tuple[int, ...], closes: bool
) -> None:
    receiver = make_receiver(loss_bound=loss_bound)
    for chunk in arrived:
        give(receiver, chunk)

    assert receiver.settle(1.0) is closes
    assert (receiver.state is ReceiverState.CLOSED) is closes


def test_the_stop_carries_the_final_bitmap_and_comes_once() -> None:
    receiver = make_receiver(loss_bound=0.25)
    give(receiver, 0)
    give_tail(receiver)
    give(receiver, 2)

    assert receiver.settle(1.0)
    assert not receiver.settle(2.0)

    assert receiver.next_control() == Stop(*NAMES, b"\xb0")
    assert receiver.next_control() is None
    assert receiver.arrived_C.tolist() == [True, False, True, True]


def test_what_lies_in_the_queue_is_taken_before_the_round_closes() -> None:
    receiver = make_receiver(loss_bound=0.5)
    give(receiver, 0, 1)
    give(receiver, 2)

    receiver.settle(1.0)

    assert receiver.statistics().missing == 1


def test_the_latency_is_from_opened_to_closed() -> None:
    receiver = make_receiver(now=2.0, loss_bound=0.75)
    give(receiver, 0)
    receiver.settle(3.5)

    assert receiver.statistics().latency_s == 1.5


# -- a deadline --------------------------------------------------------------------


def test_at_its_deadline_a_round_takes_what_is_there() -> None:
    values_N = np.zeros(7, np.float32)
    receiver = make_receiver(values_N, now=2.0, deadline=FixedDeadline(0.5))
    give(receiver, 1)
    assert not receiver.settle(2.0)
    assert receiver.timer() == 2.5
    assert not receiver.settle(2.499)

    assert receiver.settle(2.5)

    assert receiver.next_control() == Stop(*NAMES, b"\x40")
    assert receiver.statistics().missing == 3
    assert receiver.timer() is None
    assert values_N.tolist() == [0, 0, 11, 12, 0, 0, 0]


def test_what_lies_in_the_queue_is_taken_at_the_deadline_too() -> None:
    receiver = make_receiver(deadline=FixedDeadline(0.5))
    give(receiver, 1)
    receiver.settle(0.0)

    give(receiver, 0, 2)
    receiver.settle(0.5)

    assert receiver.statistics().missing == 1


def test_a_round_of_which_nothing_is_here_waits_for_its_first_chunk() -> None:
    """And its timer does not name the deadline, where there is nothing to do."""
    receiver = make_receiver(timeout_s=60.0, deadline=FixedDeadline(0.5))
    receiver.receive_probe()
    assert not receiver.settle(0.0)
    assert not receiver.settle(7.0)
    assert receiver.timer() == 60.0
    assert receiver.handle_timer(59.0) is None

    give(receiver, 2)

    assert receiver.settle(8.0)
    assert receiver.statistics().missing == 3


def test_a_round_within_its_bound_does_not_wait_for_its_deadline() -> None:
    receiver = make_receiver(loss_bound=0.5, deadline=FixedDeadline(0.5))
    give(receiver, 0, 1)

    assert receiver.settle(0.1)


def test_a_bound_that_comes_late_brings_its_deadline_from_then_on() -> None:
    receiver = make_receiver(now=0.0)
    give(receiver, 0)
    assert not receiver.settle(0.0)
    assert receiver.timer() == 60.0

    receiver.set_bound(0.25, FixedDeadline(0.5))
    assert not receiver.settle(3.0)

    assert receiver.timer() == 3.5
    assert receiver.settle(3.5)


def test_the_deadline_learns_how_long_a_round_took_and_which_was_cut() -> None:
    """Sixteen rounds of 0.2 s; then one of 0.4 s is cut, and so are 15 more."""
    deadline = LearnedDeadline(4.0, 5.0)
    for number in range(32):
        receiver = make_receiver(now=10.0 * number, deadline=deadline)
        give(receiver, 0, 1, 2)
        receiver.settle(10.0 * number)
        if number < 16:
            give_tail(receiver)
            assert receiver.settle(10.0 * number + 0.2)
        else:
            assert deadline.limit_s == pytest.approx(0.4)
            assert receiver.timer() == pytest.approx(10.0 * number + 0.4)
            assert receiver.settle(10.0 * number + 0.41)

    assert deadline.limit_s == 5.0


# -- the timeout -----------------------------------------------------------------


def test_the_timeout_is_just_reached_or_just_not() -> None:
    receiver = make_receiver(now=2.0, timeout_s=8.0)
    give(receiver, 1)

    assert receiver.timer() == 10.0
    assert receiver.handle_timer(9.999) is None
    error = receiver.handle_timer(10.0)

    assert isinstance(error, RoundTimeoutError)
    assert (error.peer, error.missing, error.chunks) == ("rank 1", 3, 4)
    assert error.waited_s == 8.0
    assert error.phase == "the gradient of round 7, bucket 2"


def test_a_closed_receiver_has_no_timeout() -> None:
    receiver = closed_receiver()

    assert receiver.timer() is None
    assert receiver.handle_timer(1e9) is None

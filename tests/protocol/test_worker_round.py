"""A worker's part of one all-reduce."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.config import LossBound, Order
from tailbound.errors import RoundTimeoutError, ShapeError
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import BucketSpec, Mean, Stop
from tailbound.protocol.plan import Limits, Plan
from tailbound.protocol.sender import Sender
from tailbound.protocol.worker_round import WorkerRound
from tailbound.records import RoundReport
from tailbound.residual import Residuals

MEAN = Mean(1, 0, 3.0, 0.408, False, 2.0, None, "no check")
SKIPPED = Mean(1, 0, 0.0, 0.008, True, 0.0, None, "skipped")


def make_plan(order: Order = "rotate", dtype: str = "float32") -> Plan:
    """Seven elements in chunks of two and a short one; timeout 8 s."""
    room_bytes = {"float32": 8, "bfloat16": 4}[dtype]
    return Plan(
        (BucketSpec(dtype, ("a",), ((7,),)),),
        LossBound(order=order),
        room_bytes,
        2,
        Limits(1 << 20, 8.0, 5.0),
    )


def make_round(
    values_N: NDArray[Any] | None = None,
    *,
    plan: Plan | None = None,
    weight: float = 1.0,
    now: float = 0.0,
    loss_scale: float = 1.0,
    residuals: Residuals | None = None,
) -> WorkerRound:
    if values_N is None:
        values_N = np.zeros(7, np.float32)
    return WorkerRound(
        plan or make_plan(),
        0,
        values_N,
        rank=1,
        weight=weight,
        p=0.25,
        critical=True,
        now=now,
        loss_scale=loss_scale,
        residuals=residuals,
    )


def sender_of(part: WorkerRound) -> Sender:
    assert part.sender is not None
    return part.sender


def stop(part: WorkerRound, now: float, bits: bytes = b"\xf0") -> None:
    """The server has enough of the gradient."""
    sender_of(part).receive_untrusted(Stop(1, 0, Direction.IN, bits), now)


def receive_mean_data(part: WorkerRound, now: float) -> None:
    """The mean, 1 to 7, arrives whole."""
    part.note_back(now)
    rows_KE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    part.receiver.receive_run(0, rows_KE)
    part.receiver.receive_tail(1, np.array([7], np.float32))
    part.receiver.settle(now)


def test_the_gradient_leaves_and_the_mean_comes_back_under_their_own_keys() -> None:
    part = make_round()

    assert sender_of(part).key == RoundKey(1, 0, Direction.IN)
    assert part.receiver.key == RoundKey(1, 0, Direction.BACK)


def test_a_worker_with_nothing_sends_nothing() -> None:
    assert make_round(weight=0.0).sender is None


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fixed", [0, 1, 2, 3]),
        ("rotate", [0, 1, 2, 3]),  # 0.618 + 1/2 is 1.118: starts at 0.118 * 4
        ("norm", [2, 0, 3, 1]),
    ],
)
def test_chunks_leave_in_the_plans_order(order: Order, expected: list[int]) -> None:
    values_N = np.array([3, 4, 0, 0, 6, 8, -2], np.float32)  # norms 5, 0, 10, 2
    part = make_round(values_N, plan=make_plan(order))

    sent: list[int] = []
    while (batch_K := sender_of(part).next_chunks(0.0, 64, 65535)) is not None:
        sent += batch_K.tolist()

    assert sent == expected


def test_norms_of_bfloat16_are_of_its_values_not_of_its_bits() -> None:
    values_N = np.array([0, 0, 0x3F80, 0, 0xC000, 0, 0x3E80], np.uint16)
    part = make_round(values_N, plan=make_plan("norm", "bfloat16"))

    batch_K = sender_of(part).next_chunks(0.0, 64, 65535)  # norms 0, 1, 2, 0.25

    assert batch_K is not None
    assert batch_K.tolist() == [2, 1, 3]


def test_an_array_that_is_not_the_bucket_is_refused() -> None:
    with pytest.raises(ShapeError, match="7 contiguous elements"):
        make_round(np.zeros(6, np.float32))


# -- the end -------------------------------------------------------------------


def test_a_round_is_complete_once_stop_mean_and_data_are_here() -> None:
    values_N = np.zeros(7, np.float32)
    part = make_round(values_N)
    seen = [part.is_complete]

    receive_mean_data(part, 1.0)
    seen.append(part.is_complete)
    stop(part, 1.0)
    seen.append(part.is_complete)
    part.receive_mean(MEAN, 2.0)
    seen.append(part.is_complete)

    assert seen == [False, False, False, True]
    assert values_N.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_mean_that_overtakes_the_stop_waits_for_it() -> None:
    part = make_round()
    part.receive_mean(MEAN, 1.0)
    receive_mean_data(part, 1.0)
    seen = [part.is_complete]

    stop(part, 2.0)
    seen.append(part.is_complete)

    assert seen == [False, True]


def test_an_announced_mean_waits_for_every_chunk() -> None:
    part = make_round(weight=0.0)
    part.receive_mean(MEAN, 1.0)
    part.receiver.receive_run(0, np.ones((3, 2), np.float32))
    part.receiver.settle(1.0)
    seen = [part.is_complete]

    part.receiver.receive_tail(1, np.ones(1, np.float32))
    part.receiver.settle(1.0)
    seen.append(part.is_complete)

    assert seen == [False, True]


def test_a_round_in_which_nobody_had_anything_ends_with_its_announcement() -> None:
    values_N = np.full(7, 5, np.float32)
    part = make_round(values_N, weight=0.0)

    part.receive_mean(SKIPPED, 1.0)

    assert part.is_complete
    assert values_N.tolist() == [5] * 7


# -- the residual --------------------------------------------------------------


def test_what_the_final_bitmap_shows_missing_is_part_of_the_next_gradient() -> None:
    """Bits 1011: chunk 1, elements 2 and 3, is missing; the scale halves."""
    residuals = Residuals()
    first_N = np.array([1, 2, 3, 4, 5, 6, 7], np.float32)
    first = make_round(first_N, loss_scale=2.0, residuals=residuals)
    receive_mean_data(first, 1.0)  # overtakes the stop
    stop(first, 2.0, bits=b"\xb0")
    first.receive_mean(MEAN, 3.0)
    first.keep_lost()
    next_N = np.full(7, 10, np.float32)

    make_round(next_N, residuals=residuals)

    assert next_N.tolist() == [10, 10, 11.5, 12, 10, 10, 10]


def test_a_worker_with_nothing_leaves_what_it_owes_for_later() -> None:
    residuals = Residuals()
    owes = make_round(np.ones(7, np.float32), residuals=residuals)
    stop(owes, 1.0, bits=b"\x70")
    owes.keep_lost()

    idle_N = np.full(7, 5, np.float32)
    make_round(idle_N, weight=0.0, residuals=residuals).keep_lost()
    next_N = np.zeros(7, np.float32)
    make_round(next_N, residuals=residuals)

    assert idle_N.tolist() == [5] * 7
    assert next_N.tolist() == [1, 1, 0, 0, 0, 0, 0]


def test_the_largest_norms_are_those_of_what_is_sent() -> None:
    """Chunk 3 owes 9, so it leaves first."""
    residuals, plan = Residuals(), make_plan("norm")
    owes = make_round(
        np.array([0, 0, 0, 0, 0, 0, 9], np.float32), plan=plan, residuals=residuals
    )
    stop(owes, 1.0, bits=b"\xe0")
    owes.keep_lost()
    values_N = np.array([3, 4, 0, 0, 6, 5, 0], np.float32)

    part = make_round(values_N, plan=plan, residuals=residuals)
    batch_K = sender_of(part).next_chunks(0.0, 64, 65535)

    assert batch_K is not None
    assert batch_K[0] == 3


# -- deadlines -----------------------------------------------------------------


def test_the_gradients_deadline_is_the_senders() -> None:
    part = make_round(now=2.0)

    assert part.timer() == 10.0
    assert part.handle_timer(9.999) is None
    error = part.handle_timer(10.0)

    assert isinstance(error, RoundTimeoutError)
    assert error.phase == "the gradient of round 1, bucket 0"


def test_a_server_that_says_nothing_is_given_up_after_its_own_deadline() -> None:
    """It would name the rank it waits for after 8 s; we wait 1.25 times that and 1."""
    part = make_round(now=2.0, weight=0.0)

    assert part.timer() == 13.0
    assert part.handle_timer(12.999) is None
    error = part.handle_timer(13.0)

    assert isinstance(error, RoundTimeoutError)
    assert error.peer == "the server"
    assert error.phase == "the mean of round 1, bucket 0"
    assert (error.missing, error.chunks, error.waited_s) == (4, 4, 11.0)


def test_the_way_back_has_its_time_from_its_first_sign() -> None:
    part = make_round(now=2.0)
    stop(part, 6.0)
    assert part.timer() == 13.0

    part.note_back(7.0)
    part.receive_mean(MEAN, 8.0)

    assert part.timer() == 18.0
    assert part.handle_timer(17.999) is None
    assert part.handle_timer(18.0) is not None


# -- reports -------------------------------------------------------------------


def test_both_ways_are_reported() -> None:
    part = make_round(now=1.0)
    sender = sender_of(part)
    sender.next_chunks(2.0, 64, 65535)
    stop(part, 4.5, bits=b"\xe0")
    receive_mean_data(part, 5.0)
    part.receiver.receive_tail(2, np.array([7], np.float32))
    part.receive_mean(MEAN, 6.0)

    assert part.reports() == (
        RoundReport(
            rank=1,
            step=0,
            counter=1,
            bucket=0,
            direction="in",
            p=0.25,
            critical=True,
            num_chunks=4,
            num_bytes=28,
            missing=1,
            sends=1,
            probes=1,
            sent=4,
            retransmitted=0,
            latency_s=2.5,
            waiting_s=2.5,
            early_stop=False,
        ),
        RoundReport(
            rank=1,
            step=0,
            counter=1,
            bucket=0,
            direction="back",
            p=0.0,
            critical=True,
            num_chunks=4,
            num_bytes=28,
            missing=0,
            sends=1,
            probes=0,
            sent=6,
            retransmitted=2,
            latency_s=0.0,
            waiting_s=0.0,
            early_stop=False,
        ),
    )


def test_the_way_backs_latency_is_from_its_first_sign_until_closed() -> None:
    part = make_round(now=1.0, weight=0.0)
    part.receive_mean(MEAN, 2.0)
    receive_mean_data(part, 2.75)

    (report,) = part.reports()
    assert report.direction == "back"
    assert report.latency_s == 0.75


def test_a_skipped_round_has_nothing_to_report() -> None:
    part = make_round(weight=0.0)
    part.receive_mean(SKIPPED, 1.0)

    assert part.reports() == ()


def test_a_round_without_its_mean_reports_the_way_in_only() -> None:
    assert [report.direction for report in make_round().reports()] == ["in"]

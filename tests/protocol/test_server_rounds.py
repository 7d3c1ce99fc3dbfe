"""The server's part of all rounds: collect, take the mean, set p, send back."""

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import PeerProtocolError, RoundTimeoutError, WireError
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.headers import HeaderTable
from tailbound.protocol.messages import Begin, BucketSpec, Mean, Stop
from tailbound.protocol.plan import Limits, Plan
from tailbound.protocol.server_rounds import ServerRounds

BUCKET = BucketSpec("float32", ("a", "b"), ((4,), (3,)))


def make_rounds(
    bound: LossBound | None = None,
    *,
    buckets: tuple[BucketSpec, ...] = (BUCKET,),
    world_size: int = 2,
    first_counter: int = 1,
) -> ServerRounds:
    """Seven elements in chunks of two and a short one; timeout 8 s."""
    return ServerRounds(
        Plan(
            buckets,
            bound or LossBound.fixed(0.5),
            8,
            world_size,
            Limits(1 << 20, 8.0, 5.0),
            first_counter,
        )
    )


def begin(rounds: ServerRounds, rank: int, weight: float, now: float = 0.0) -> None:
    key = rounds.key
    rounds.begin(rank, Begin(key.counter, key.bucket, weight, None, 1.0), now)


def give(
    rounds: ServerRounds,
    rank: int,
    value: float,
    chunks: tuple[int, ...] = (0, 1, 2, 3),
    now: float = 0.0,
) -> None:
    """Chunks of a gradient whose elements are all ``value``; 3 is the short one."""
    receiver = rounds.arrival(rank, now)
    for chunk in chunks:
        if chunk == 3:
            receiver.receive_tail(1, np.full(1, value, np.float32))
        else:
            receiver.receive(np.array([chunk]), np.full((1, 2), value, np.float32))
    receiver.settle(now)


def finish(rounds: ServerRounds, now: float = 1.0) -> Mean:
    mean = rounds.try_finish(now)
    assert mean is not None
    return mean


def mean_values(rounds: ServerRounds, rank: int = 0) -> list[float]:
    """What the mean's sender to this rank would put into datagrams."""
    (pair,) = rounds.senders(rank)
    sender, rows = pair
    chunks_K = sender.next_chunks(1.0, 64, 65535)
    assert chunks_K is not None
    table = HeaderTable(rows.layout, sender.key, 9, 65535)
    out = bytearray(rows.layout.segment_bytes * len(chunks_K))
    end = rows.pack(chunks_K, table, memoryview(out))
    values: list[float] = []
    for start in range(0, end, 32):
        values += np.frombuffer(out[start + 24 : min(start + 32, end)], "<f4").tolist()
    return values


# -- a round -------------------------------------------------------------------


def test_the_mean_is_the_sum_over_the_total_weight() -> None:
    rounds = make_rounds()
    begin(rounds, 0, weight=1.0)
    begin(rounds, 1, weight=3.0)
    give(rounds, 0, 2.0)
    give(rounds, 1, 6.0)

    mean = finish(rounds)

    assert (mean.counter, mean.bucket, mean.total_weight) == (1, 0, 4.0)
    assert mean_values(rounds) == [2.0] * 7  # (2 + 6) / 4
    assert mean.norm == pytest.approx(5.291502622129181)  # 2 * sqrt(7)
    assert rounds.key == RoundKey(2, 0, Direction.IN)


@pytest.mark.parametrize("missing", ["begin", "data", "rank"])
def test_no_mean_is_taken_before_every_rank_is_in(missing: str) -> None:
    rounds = make_rounds()
    begin(rounds, 0, 1.0)
    give(rounds, 0, 2.0)
    if missing != "rank" and missing != "begin":
        begin(rounds, 1, 1.0)
    if missing == "data":
        give(rounds, 1, 2.0, (0,))
    if missing == "begin":
        give(rounds, 1, 2.0)

    assert rounds.try_finish(1.0) is None
    assert rounds.senders(0) == ()


def test_data_may_come_before_its_announcement() -> None:
    rounds = make_rounds()
    give(rounds, 1, 3.0)
    give(rounds, 0, 3.0)
    begin(rounds, 0, 1.0)
    assert rounds.try_finish(0.5) is None

    begin(rounds, 1, 1.0)

    finish(rounds)
    assert mean_values(rounds) == [3.0] * 7


def test_a_hole_counts_as_zero() -> None:
    rounds = make_rounds()
    begin(rounds, 0, 1.0)
    begin(rounds, 1, 1.0)
    give(rounds, 0, 4.0, (0, 2))
    give(rounds, 1, 8.0, (0, 1, 3))

    finish(rounds)

    assert mean_values(rounds) == [6, 6, 4, 4, 2, 2, 4]


def test_or_a_hole_is_the_mean_of_what_arrived() -> None:
    rounds = make_rounds(LossBound(p_low=0.5, p_high=0.5, holes="received_mean"))
    begin(rounds, 0, 1.0)
    begin(rounds, 1, 3.0)
    give(rounds, 0, 4.0, (0, 2))
    give(rounds, 1, 24.0, (0, 1))

    finish(rounds)

    assert mean_values(rounds) == [7, 7, 8, 8, 4, 4, 0]


def test_three_workers_of_which_one_is_missing_give_the_specs_values() -> None:
    for holes, expected in (("zero", 3.0), ("received_mean", 4.5)):
        bound = LossBound(p_low=0.9, p_high=0.9, holes=holes)  # type: ignore[arg-type]
        rounds = make_rounds(bound, world_size=3)
        for rank, value in enumerate((3.0, 6.0, 9.0)):
            begin(rounds, rank, 1.0)
            give(rounds, rank, value, (0, 1, 2, 3) if rank < 2 else (1,))

        finish(rounds)

        assert mean_values(rounds)[0] == expected


def test_a_rank_with_nothing_is_not_waited_for() -> None:
    rounds = make_rounds()
    begin(rounds, 0, 0.0)
    begin(rounds, 1, 2.0)
    give(rounds, 1, 6.0)

    mean = finish(rounds)

    assert mean.total_weight == 2.0
    assert mean_values(rounds) == [3.0] * 7
    assert mean_values(rounds, rank=1) == [3.0] * 7


def test_the_counts_of_all_ranks_are_told_with_the_mean() -> None:
    rounds = make_rounds()
    rounds.begin(0, Begin(1, 0, 3.0, None, 1.0, 2.5, 4), 0.0)
    rounds.begin(1, Begin(1, 0, 0.0, None, 1.0, 0.0, 3), 0.0)
    give(rounds, 0, 3.0)

    mean = finish(rounds)

    assert (mean.total_computed, mean.total_planned) == (2.5, 7)


def test_a_round_in_which_nobody_has_anything_is_skipped() -> None:
    rounds = make_rounds(LossBound())
    begin(rounds, 0, 0.0)
    begin(rounds, 1, 0.0)

    assert finish(rounds) == Mean(
        1, 0, 0.0, 0.008, True, 0.0, None, "skipped: no rank had anything", 2.0, 2
    )
    assert rounds.senders(0) == ()
    assert rounds.key.counter == 2


def test_nothing_of_a_round_is_left_in_the_next() -> None:
    rounds = make_rounds()
    for value in (2.0, 10.0):
        for rank in (0, 1):
            begin(rounds, rank, 1.0)
            give(rounds, rank, value)
        finish(rounds)

    assert mean_values(rounds) == [10.0] * 7


def test_buckets_take_turns_each_with_a_sum_of_its_own() -> None:
    other = BucketSpec("float32", ("c",), ((2,),))
    rounds = make_rounds(buckets=(BUCKET, other), world_size=1)
    begin(rounds, 0, 1.0)
    give(rounds, 0, 2.0)
    finish(rounds)
    assert rounds.key == RoundKey(2, 1, Direction.IN)

    begin(rounds, 0, 1.0)
    give(rounds, 0, 5.0, (0,))
    finish(rounds)

    assert mean_values(rounds) == [5.0, 5.0]
    assert rounds.key == RoundKey(3, 0, Direction.IN)


def test_the_counter_wraps_around() -> None:
    rounds = make_rounds(first_counter=2**32 - 1)
    counters = []
    for _ in range(3):
        begin(rounds, 0, 0.0)
        begin(rounds, 1, 0.0)
        counters.append(finish(rounds).counter)

    assert counters == [4294967295, 0, 1]


def test_the_mean_goes_back_to_every_rank_under_its_own_key() -> None:
    rounds = make_rounds()
    for rank in (0, 1):
        begin(rounds, rank, 1.0)
        give(rounds, rank, 1.0)
    finish(rounds)

    for rank in (0, 1):
        (pair,) = rounds.senders(rank)
        assert pair[0].key == RoundKey(1, 0, Direction.BACK)
        assert pair[0].peer == f"rank {rank}"
    assert rounds.senders(2) == ()


def test_a_rank_that_sends_its_next_gradient_is_sent_no_mean_any_more() -> None:
    rounds = make_rounds()
    for rank in (0, 1):
        begin(rounds, rank, 1.0)
        give(rounds, rank, 1.0)
    finish(rounds)

    give(rounds, 1, 1.0, (0,))

    assert rounds.senders(1) == ()
    assert len(rounds.senders(0)) == 1
    assert rounds.open_ranks == (1,)


# -- what holds next -------------------------------------------------------------


def test_the_bound_of_the_next_round_is_announced_with_the_mean() -> None:
    """Norms 1.0 and 1.0: the first check finds no change, p becomes p_high."""
    rounds = make_rounds(LossBound(p_low=0.0, p_high=0.75, frequency=2), world_size=1)
    said = []
    for _ in range(2):
        begin(rounds, 0, 1.0)
        give(rounds, 0, 1.0)
        mean = finish(rounds)
        said.append((mean.p, mean.critical, mean.ratio))
    assert said == [(0.0, True, None), (0.75, False, 0.0)]

    begin(rounds, 0, 1.0)
    give(rounds, 0, 1.0, (2,))

    assert rounds.try_finish(1.0) is not None


def test_the_norm_is_of_what_would_have_arrived_without_loss_or_loss_scale() -> None:
    """Half of the chunks: the raw norm 8 * sqrt(4) grows by sqrt(2), over scale 4."""
    rounds = make_rounds(world_size=1)
    rounds.begin(0, Begin(1, 0, 1.0, 0.1, 4.0), 0.0)
    give(rounds, 0, 8.0, (0, 1))

    assert finish(rounds).norm == pytest.approx(5.656854249492381)


def test_a_stop_is_put_out_for_each_rank_before_the_mean() -> None:
    rounds = make_rounds(world_size=1)
    begin(rounds, 0, 1.0)
    give(rounds, 0, 8.0, (0, 3))

    assert rounds.arrival(0, 0.0).next_control() == Stop(1, 0, Direction.IN, b"\x90")


# -- what a worker may not say -----------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "loss_scale"),
    [(-1.0, 1.0), (float("nan"), 1.0), (1e31, 1.0), (1.0, 0.0), (1.0, float("nan"))],
)
def test_numbers_out_of_range_are_refused(weight: float, loss_scale: float) -> None:
    rounds = make_rounds()

    with pytest.raises(WireError, match="loss scale"):
        rounds.begin(0, Begin(1, 0, weight, None, loss_scale), 0.0)
    assert rounds.open_ranks == ()


@pytest.mark.parametrize("weight", [1e-30, 1e30])
def test_the_smallest_and_the_largest_weight_give_a_finite_mean(weight: float) -> None:
    rounds = make_rounds(LossBound(holes="received_mean"))
    for rank in (0, 1):
        begin(rounds, rank, weight)
        give(rounds, rank, weight)

    finish(rounds)

    assert mean_values(rounds) == pytest.approx([1.0] * 7)


def test_a_round_is_announced_once() -> None:
    rounds = make_rounds()
    begin(rounds, 1, 1.0)

    with pytest.raises(PeerProtocolError, match="rank 1 sent Begin twice"):
        begin(rounds, 1, 0.0)


# -- deadlines -----------------------------------------------------------------


def test_nothing_is_due_while_no_round_is_open() -> None:
    rounds = make_rounds()

    assert rounds.timer() is None
    assert rounds.handle_timer(1e9) is None


def test_the_ranks_that_are_late_are_named_just_at_the_deadline() -> None:
    rounds = make_rounds(world_size=3)
    begin(rounds, 1, 0.0, now=2.0)

    assert rounds.timer() == 10.0
    assert rounds.handle_timer(9.999) is None
    error = rounds.handle_timer(10.0)

    assert isinstance(error, RoundTimeoutError)
    assert error.peer == "rank 0, rank 2"
    assert error.phase == "the gradient of round 1, bucket 0"
    assert (error.missing, error.chunks, error.waited_s) == (4, 4, 8.0)


def test_a_rank_whose_data_stays_away_is_named_with_what_is_missing() -> None:
    rounds = make_rounds()
    begin(rounds, 0, 1.0, now=2.0)
    give(rounds, 0, 1.0, (1,), now=2.0)

    error = rounds.handle_timer(10.0)

    assert isinstance(error, RoundTimeoutError)
    assert (error.peer, error.missing, error.chunks) == ("rank 0", 3, 4)


def test_a_mean_that_a_rank_does_not_take_ends_the_job_at_its_deadline() -> None:
    rounds = make_rounds()
    for rank in (0, 1):
        begin(rounds, rank, 1.0)
        give(rounds, rank, 1.0)
    finish(rounds, now=3.0)
    (pair,) = rounds.senders(0)
    pair[0].receive_untrusted(Stop(1, 0, Direction.BACK, b"\xf0"), 4.0)

    assert rounds.timer() == 11.0
    assert rounds.handle_timer(10.999) is None
    error = rounds.handle_timer(11.0)

    assert isinstance(error, RoundTimeoutError)
    assert (error.peer, error.phase) == ("rank 1", "the mean of round 1, bucket 0")

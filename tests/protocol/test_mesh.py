"""A mesh's rounds, over the fake mesh: who sends what to whom, and what is refused."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    PeerLostError,
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import Direction, Failed, Reduced, RoundKey
from tailbound.protocol.headers import BucketBytes, HeaderTable
from tailbound.protocol.mesh import MAX_AHEAD
from tailbound.protocol.messages import (
    Begin,
    Message,
    Probe,
    ShardBegin,
    ShardMean,
)
from tailbound.protocol.shards import cut_shards
from tailbound.protocol.wire import encode_control
from tailbound.testing import FakeMesh

EXACT = LossBound.fixed(0.0)


def started(world_size: int = 3, bound: LossBound = EXACT, **options: Any) -> FakeMesh:
    net = FakeMesh(world_size, bound, **options)
    net.start()
    return net


def vectors(*rows: list[float]) -> list[NDArray[np.float32]]:
    return [np.array(row, np.float32) for row in rows]


def tell(net: FakeMesh, source: int, target: int, message: Message) -> None:
    net.ranks[target].receive_control(source, encode_control(message), net.now)


def error_of(net: FakeMesh, rank: int) -> TailboundError:
    """What this rank failed with."""
    error = net.ranks[rank].error
    assert error is not None
    return error


def lose_chunk_0(net: FakeMesh) -> None:
    """Of the two chunks that rank 1 sends to rank 0 only the second one arrives."""
    out = memoryview(bytearray(65535))
    sent = net.ranks[1].next_datagrams(0, out, net.now, max_segments=2, max_bytes=65535)
    assert sent == (2944, 1472)
    first = 1472 if out[19] == 0 else 0
    net.ranks[0].receive_datagrams(1, out[first:], 1472, 1472, net.now)


BEGIN = ShardBegin(1, 0, 1, True, "float32", 1000, 1, 1.0, None, 1.0, 1.0, 1)

# -- means -----------------------------------------------------------------------


def test_the_mean_is_weighted_and_the_same_everywhere() -> None:
    net = started(bound=EXACT)
    grads = vectors([1, 2], [20, 40], [0, 0])  # already multiplied by their weights

    events = net.all_reduce(grads, [1.0, 3.0, 0.0])

    assert [grad.tolist() for grad in grads] == [[5.25, 10.5]] * 3
    assert [event.total_weight for event in events] == [4.0] * 3


def test_counts_are_summed_over_ranks() -> None:
    net = started(2)
    grads = vectors([1.0], [3.0])

    events = net.all_reduce(grads, [1.0, 1.0], computed=1.5, planned=2)

    assert [(e.total_computed, e.total_planned) for e in events] == [(3.0, 4)] * 2


def test_a_step_in_which_nobody_has_anything_leaves_the_buffers_alone() -> None:
    net = started(2)
    grads = vectors([1, 2], [3, 4])

    (event, _) = net.all_reduce(grads, [0.0, 0.0])

    assert [grad.tolist() for grad in grads] == [[1, 2], [3, 4]]
    assert (event.total_weight, event.verdict, event.reports) == (
        0.0,
        "skipped: no rank had anything",
        (),
    )


def test_each_shard_is_reduced_by_its_owner() -> None:
    """1000 floats are three chunks of 362 at 1448 bytes: one for each rank."""
    net = started(3)
    grads = [np.full(1000, rank, np.float32) for rank in (1, 2, 6)]

    events = net.all_reduce(grads, [1.0] * 3)

    assert all((grad == 3.0).all() for grad in grads)
    way_in, way_back = events[0].reports
    assert (way_in.direction, way_in.num_chunks, way_in.num_bytes) == ("in", 2, 2552)
    assert (way_back.direction, way_back.num_chunks) == ("back", 2)
    assert (way_in.sends, way_in.retransmitted, way_in.missing) == (1, 0, 0)
    # The root of 1000 times 3 squared.
    assert events[0].norm == pytest.approx(94.86832980505137, rel=1e-6)


def test_a_hole_counts_as_zero_in_its_shard_only() -> None:
    """What rank 1 sends to rank 0 vanishes but for the first chunk of two."""
    net = started(2, LossBound.fixed(0.5))
    grads = [np.full(1448, rank, np.float32) for rank in (1, 2)]  # 4 chunks
    net.begin(grads, [1.0, 1.0])
    lose_chunk_0(net)

    net.run_until(Reduced)

    assert grads[0].tolist() == grads[1].tolist()
    assert grads[0][:362].tolist() == [0.5] * 362
    assert grads[0][362:].tolist() == [1.5] * 1086


def test_a_chunk_may_be_the_mean_of_what_arrived() -> None:
    net = started(2, LossBound(p_low=0.5, p_high=0.5, holes="received_mean"))
    grads = [np.full(1448, rank, np.float32) for rank in (1, 2)]
    net.begin(grads, [1.0, 1.0])
    lose_chunk_0(net)

    net.run_until(Reduced)

    assert grads[1][:362].tolist() == [1.0] * 362
    assert grads[1][362:724].tolist() == [1.5] * 362


def test_what_a_shard_lost_is_part_of_its_senders_next_gradient() -> None:
    """Rank 1's chunk 0 is lost; a rank loses nothing to itself."""
    net = started(2, LossBound(p_low=0.5, p_high=0.5, holes="residual"))
    grads = [np.full(1448, rank, np.float32) for rank in (1, 2)]
    net.begin(grads, [1.0, 1.0])
    lose_chunk_0(net)
    net.run_until(Reduced)
    later = [np.zeros(1448, np.float32) for _ in range(2)]

    net.all_reduce(later, [1.0, 1.0], step=1)

    assert grads[0][:362].tolist() == [0.5] * 362
    assert later[0].tobytes() == later[1].tobytes()
    assert later[0].tolist() == [1.0] * 362 + [0.0] * 1086


def test_the_senders_momentum_is_in_ones_own_shard_too() -> None:
    """Nothing is lost: 4, then 0.5 * 4 + 1, then 0.5 * 3 + 0."""
    bound = LossBound(p_low=0, p_high=0, holes="residual", residual_momentum=0.5)
    net = started(2, bound)
    seen = []

    for step, value in enumerate((4.0, 1.0, 0.0)):
        grads = [np.full(1448, value, np.float32) for _ in range(2)]
        net.all_reduce(grads, [1.0, 1.0], step=step)
        seen.append({*grads[0].tolist(), *grads[1].tolist()})

    assert seen == [{4.0}, {3.0}, {1.5}]


def test_with_a_residual_a_step_ends_before_the_next_begins() -> None:
    net = started(2, LossBound(holes="residual"))
    net.begin([np.ones(1448, np.float32)] * 2, [1.0, 1.0])

    with pytest.raises(ConfigError, match="what the bucket lost is not known yet"):
        net.begin([np.ones(1448, np.float32)] * 2, [1.0, 1.0], step=1)


def test_the_largest_chunks_may_leave_first() -> None:
    net = started(2, LossBound(p_low=0.0, p_high=0.0, order="norm"))
    grads = [np.arange(1448, dtype=np.float32), np.zeros(1448, np.float32)]
    net.begin(grads, [1.0, 1.0])
    out = memoryview(bytearray(65535))

    net.ranks[0].next_datagrams(1, out, net.now, max_segments=1, max_bytes=65535)

    assert out[19] == 1  # the second chunk of rank 1's shard holds larger numbers


def test_a_batch_that_not_even_one_chunk_fits_is_none() -> None:
    net = started(2)
    net.begin([np.ones(1000, np.float32)] * 2, [1.0, 1.0])
    out = memoryview(bytearray(65535))

    sent = net.ranks[0].next_datagrams(1, out, net.now, max_segments=44, max_bytes=1471)

    assert sent is None


def test_the_counter_wraps() -> None:
    net = started(2, first_counter=2**32 - 1)

    for step in range(3):
        grads = vectors([1.0], [3.0])
        events = net.all_reduce(grads, [1.0, 1.0], step=step)
        assert grads[0].tolist() == [2.0]
        assert events[0].counter == (2**32 - 1, 0, 1)[step]


# -- a lossy way back ------------------------------------------------------------


def test_what_a_rank_missed_of_a_mean_comes_with_its_next_one() -> None:
    """Five means of 2, then zeros: each rank gets 10 in the end, part of it late."""
    net = started(
        3,
        LossBound(p_low=0.0, p_high=0.0, p_back=0.5),
        impairments=Impairments(losses=(IndependentLoss(rate=0.3),), delay_s=0.001),
        seed=3,
    )
    got = [np.zeros(4001, np.float32) for _ in range(3)]
    has_differed = False
    missing = 0

    for step in range(25):
        value = 1.0 if step < 5 else 0.0
        grads = [np.full(4001, value * rank, np.float32) for rank in (1, 2, 3)]
        events = net.all_reduce(grads, [1.0] * 3, step=step)
        has_differed |= grads[0].tobytes() != grads[1].tobytes()
        for sum_N, mean_N in zip(got, grads, strict=True):
            sum_N += mean_N
        ways_back = [event.reports[1] for event in events]
        assert {report.p for report in ways_back} == {0.5}
        assert all(2 * report.missing <= report.num_chunks for report in ways_back)
        missing += sum(report.missing for report in ways_back)

    assert has_differed
    assert missing > 0
    assert [set(sum_N.tolist()) for sum_N in got] == [{10.0}] * 3


def test_an_owner_misses_nothing_of_its_own_mean() -> None:
    net = started(
        2,
        LossBound(p_low=0.0, p_high=0.0, p_back=0.8),
        impairments=Impairments(losses=(IndependentLoss(rate=0.5),), delay_s=0.001),
        seed=3,
    )
    grads = [np.ones(5000, np.float32) for _ in range(2)]

    net.all_reduce(grads, [1.0, 1.0])

    # 14 chunks of 362 elements, 7 for each rank.
    assert set(grads[0][:2534].tolist()) == set(grads[1][2534:].tolist()) == {1.0}
    assert 0.0 in grads[0][2534:]
    assert 0.0 in grads[1][:2534]


def test_what_is_owed_may_be_forgotten() -> None:
    net = started(
        2,
        LossBound(p_low=0.0, p_high=0.0, p_back=0.8),
        impairments=Impairments(losses=(IndependentLoss(rate=0.5),), delay_s=0.001),
        seed=3,
    )
    net.all_reduce([np.ones(5000, np.float32) for _ in range(2)], [1.0, 1.0])

    for rank in net.ranks:
        assert rank.plan is not None
        rank.plan.forget_owed()
    later = [np.zeros(5000, np.float32) for _ in range(2)]
    net.all_reduce(later, [1.0, 1.0], step=1)

    assert not later[0].any()
    assert not later[1].any()


# -- several rounds, ranks that are ahead ------------------------------------------


def test_a_rank_that_is_ahead_is_taken_in_before_our_own_call() -> None:
    net = started(2)
    stale = []
    for step in (1, 2):
        grads = [np.full(1000, rank, np.float32) for rank in (1, 3)]
        net.begin(grads, [1.0, 1.0], ranks=[1], step=step)
        net.run_for(0.1)
        net.begin(grads, [1.0, 1.0], ranks=[0], step=step)
        events = net.run_until(Reduced)
        assert (grads[0] == 2.0).all()
        stale.append(net.ranks[0].counters().stale)
    # In the first step the data overtakes the announcement, and no shape is known.
    assert stale == [2, 2]
    assert events[1].reports[0].sends == 1


def test_data_that_comes_before_its_announcement_opens_a_round_of_a_known_shape() -> (
    None
):
    net = started(2)
    grads = [np.full(1000, 1.0, np.float32) for _ in range(2)]
    net.all_reduce(grads, [1.0, 1.0])
    net.begin(grads, [1.0, 1.0], ranks=[1], step=2)
    out = memoryview(bytearray(65535))
    size, segment = net.ranks[1].next_datagrams(
        0, out, net.now, max_segments=1, max_bytes=65535
    ) or (0, 0)

    net.ranks[0].receive_datagrams(1, out, size, segment, net.now)

    assert net.ranks[0].counters().stale == 0
    net.begin(grads, [1.0, 1.0], ranks=[0], step=2)
    net.run_until(Reduced)
    assert (grads[0] == 1.0).all()


def test_no_sender_is_stopped_while_a_shape_is_a_guess() -> None:
    """All of a shard is there; a timer looks at the round before it is announced."""
    net = started(2)
    grads = [np.full(1000, 1.0, np.float32) for _ in range(2)]
    net.all_reduce(grads, [1.0, 1.0])
    net.begin(grads, [1.0, 1.0], ranks=[1], step=2)
    out = memoryview(bytearray(65535))
    sent = net.ranks[1].next_datagrams(0, out, net.now, max_segments=9, max_bytes=65535)
    assert sent is not None
    net.ranks[0].receive_datagrams(1, out, *sent, net.now)

    net.ranks[0].handle_timer(net.now)
    net.ranks[0].settle(net.now)

    assert net.ranks[0].next_control(1) is None
    net.begin(grads, [1.0, 1.0], ranks=[0], step=2)
    net.run_until(Reduced)
    assert (grads[0] == 1.0).all()


def test_a_shape_that_was_guessed_wrong_is_forgotten() -> None:
    net = started(2)
    grads = [np.full(1000, 1.0, np.float32) for _ in range(2)]
    net.all_reduce(grads, [1.0, 1.0])
    layout = cut_shards(1000, 4, 1448, 2, 0)
    assert layout[0] is not None
    key = RoundKey(2, 0, Direction.IN)
    table = HeaderTable(layout[0].layout, key, net.ranks[0].session, 1)
    out = bytearray(1472)
    rows = BucketBytes(np.full(724, 9, np.float32), layout[0].layout)
    rows.pack(np.array([0]), table, memoryview(out))
    net.ranks[0].receive_datagrams(1, memoryview(out), 1472, 1472, net.now)

    other = [np.full(700, rank, np.float32) for rank in (1, 3)]
    net.all_reduce(other, [1.0, 1.0], step=2)

    assert (other[0] == 2.0).all()


def test_two_buckets_of_a_step_may_be_under_way() -> None:
    net = started(3)
    first = [np.full(5000, rank, np.float32) for rank in (0, 3, 6)]
    second = [np.full(40, rank, np.float32) for rank in (0, 6, 12)]
    net.begin(first, [1.0] * 3, is_last=False)
    net.begin(second, [1.0] * 3)

    found = [net.run_until(Reduced), net.run_until(Reduced)]

    assert (first[2] == 3.0).all()
    assert (second[0] == 6.0).all()
    assert {event.bucket for events in found for event in events} == {0, 1}


def test_the_steps_last_round_carries_the_verdict_on_the_whole_step() -> None:
    net = started(2, LossBound(p_low=0.0, p_high=0.5, frequency=1, correct_holes=False))
    for step in (1, 2):
        first, second = vectors([3.0], [3.0]), vectors([4.0], [4.0])
        net.begin(first, [1.0, 1.0], step=step, is_last=False)
        net.begin(second, [1.0, 1.0], step=step)
        events = sorted(
            (net.run_until(Reduced)[0], net.run_until(Reduced)[0]),
            key=lambda event: event.bucket,
        )
    assert [event.norm for event in events] == [3.0, 4.0]
    assert [event.ratio for event in events] == [None, 0.0]
    assert events[0].verdict == "no check"

    (event, _) = net.all_reduce(vectors([1.0], [1.0]), [1.0, 1.0], step=3)

    assert (event.p, event.critical) == (0.5, False)


# -- what does not fit ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"dtype": "int8"}, "an all-reduce of int8"),
        ({"dtype": "float16"}, "a float16 bucket is one or more flat float16"),
        ({"loss_scale": 0.0}, "loss_scale 1e-30 to 1e30"),
        ({"computed": 2.0}, "and 2.0 of 1"),
    ],
)
def test_a_call_out_of_range_is_refused(call: dict[str, Any], message: str) -> None:
    net = started(2)

    with pytest.raises(ConfigError, match=message):
        net.begin(vectors([1.0], [1.0]), [1.0, 1.0], **call)

    assert net.ranks[0].error is None


@pytest.mark.parametrize("shape", [(0,), (2, 2)])
def test_a_bucket_is_flat_and_not_empty(shape: tuple[int, ...]) -> None:
    net = started(2)

    with pytest.raises(ConfigError, match="flat"):
        net.begin([np.zeros(shape, np.float32)] * 2, [1.0, 1.0])


def test_nothing_is_reduced_before_the_start() -> None:
    net = FakeMesh(2, EXACT)

    with pytest.raises(ConfigError, match="before the start"):
        net.begin(vectors([1.0], [1.0]), [1.0, 1.0])


def test_ranks_that_differ_all_learn_both_values() -> None:
    net = started(3)
    net.begin([np.zeros(9, np.float32)] * 3, [1.0] * 3, ranks=[0, 1])
    net.begin([np.zeros(8, np.float32)] * 3, [1.0] * 3, ranks=[2])

    net.run_for(1.0)

    texts = {str(error_of(net, rank)) for rank in range(3)}
    assert any(
        "elements of a bucket differs: 9 (rank" in text and "8 (rank 2)" in text
        for text in texts
    )
    assert all("elements of a bucket" in text for text in texts)


def test_our_own_call_may_be_the_one_that_differs() -> None:
    net = started(2)
    net.begin(vectors([1.0], [1.0]), [1.0, 1.0], ranks=[1], step=7)
    net.run_for(0.1)

    with pytest.raises(HandshakeError, match=r"step differs: 8 \(rank 0\) here, 7"):
        net.begin(vectors([1.0], [1.0]), [1.0, 1.0], ranks=[0], step=8)


def test_the_same_round_is_announced_once() -> None:
    net = started(2)

    tell(net, 1, 0, BEGIN)
    tell(net, 1, 0, BEGIN)

    assert isinstance(error_of(net, 0), PeerProtocolError)
    assert "ShardBegin twice" in str(error_of(net, 0))


@pytest.mark.parametrize("counter", [MAX_AHEAD + 1, 0, 2**31])
def test_a_round_far_from_ours_is_refused(counter: int) -> None:
    net = started(2)

    tell(
        net,
        1,
        0,
        ShardBegin(counter, 0, 1, True, "float32", 9, 1, 1.0, None, 1.0, 1.0, 1),
    )

    assert f"round {counter} after 0 rounds" in str(error_of(net, 0))


@pytest.mark.parametrize(
    "mean",
    [
        ShardMean(1, 0, (1.0,), 2, 0),  # no round is open
        ShardMean(2, 1, (1.0,), 2, 0),
        ShardMean(2, 0, (1.0, 2.0), 2, 0),
        ShardMean(2, 0, (-1.0,), 2, 0),
        ShardMean(2, 0, (1.0,), 2, 3),
        ShardMean(2, 0, (1.0,), 2, -1),
    ],
    ids=str,
)
def test_a_mean_that_cannot_be_is_refused(mean: ShardMean) -> None:
    net = started(2)
    grads = [np.ones(1000, np.float32) for _ in range(2)]
    net.all_reduce(grads, [1.0, 1.0])
    net.begin(grads, [1.0, 1.0], ranks=[0], step=2)

    tell(net, 1, 0, mean)

    assert "a mean that nobody waits for" in str(error_of(net, 0))


def test_a_mean_is_told_once() -> None:
    net = started(2)
    net.begin([np.ones(1000, np.float32)] * 2, [1.0, 1.0], ranks=[0])

    tell(net, 1, 0, ShardMean(1, 0, (1.0,), 2, 0))
    tell(net, 1, 0, ShardMean(1, 0, (1.0,), 2, 0))

    assert "a mean that nobody waits for" in str(error_of(net, 0))


def test_a_message_of_the_other_plan_breaks_the_protocol() -> None:
    net = started(2)

    tell(net, 1, 0, Begin(1, 0, 1.0, None, 1.0))

    assert isinstance(error_of(net, 0), PeerProtocolError)


def test_a_probe_of_a_round_that_is_not_open_is_ignored() -> None:
    net = started(2)

    tell(net, 1, 0, Probe(9, 0, Direction.IN))
    tell(net, 1, 0, Probe(1, 0, Direction.BACK))

    assert net.ranks[0].error is None


def test_data_of_a_rank_that_has_nothing_is_not_taken() -> None:
    net = started(2)
    tell(
        net,
        1,
        0,
        ShardBegin(1, 0, 1, True, "float32", 1000, 1, 0.0, None, 1.0, 0.0, 1),
    )
    shard = cut_shards(1000, 4, 1448, 2, 0)[0]
    assert shard is not None
    key = RoundKey(1, 0, Direction.IN)
    table = HeaderTable(shard.layout, key, net.ranks[0].session, 1)
    out = bytearray(1472)
    BucketBytes(np.full(724, 9, np.float32), shard.layout).pack(
        np.array([0]), table, memoryview(out)
    )

    net.ranks[0].receive_datagrams(1, memoryview(out), 1472, 1472, net.now)

    assert net.ranks[0].counters().stale == 1


def test_datagrams_of_rounds_that_cannot_be_open_are_stale() -> None:
    net = started(2)
    net.all_reduce([np.ones(1000, np.float32)] * 2, [1.0, 1.0])
    shard = cut_shards(1000, 4, 1448, 2, 0)[0]
    assert shard is not None
    out = bytearray(1472)
    rows = BucketBytes(np.ones(724, np.float32), shard.layout)
    for key in (
        RoundKey(1, 0, Direction.IN),  # over
        RoundKey(2, 5, Direction.IN),  # of no known shape
        RoundKey(2, 0, Direction.BACK),  # a mean of a round that we are not in
        RoundKey(3000, 0, Direction.IN),  # far ahead
    ):
        table = HeaderTable(shard.layout, key, net.ranks[0].session, 1)
        rows.pack(np.array([0]), table, memoryview(out))
        net.ranks[0].receive_datagrams(1, memoryview(out), 1472, 1472, net.now)

    assert net.ranks[0].counters().stale == 4


# -- deadlines ---------------------------------------------------------------------


def test_a_rank_that_never_begins_is_named() -> None:
    net = started(3, timeout_s=10.0)
    net.begin([np.ones(1000, np.float32)] * 3, [1.0] * 3, ranks=[0, 1])

    with pytest.raises(RoundTimeoutError, match="rank 2"):
        net.run_until(Reduced, ranks=[0])


def test_a_rank_whose_gradient_stays_away_is_named() -> None:
    net = started(3, timeout_s=10.0, silence_s=60.0)
    net.cut_udp(0, [2])
    net.begin([np.ones(5000, np.float32)] * 3, [1.0] * 3)

    net.run_for(11.0)

    error = error_of(net, 0)
    assert isinstance(error, RoundTimeoutError)
    assert "rank 2" in str(error)
    assert "rank 1" not in str(error)


def test_an_owner_whose_mean_stays_away_is_named() -> None:
    """Rank 0 has nothing to send and gets nothing: only means are awaited."""
    net = started(2, timeout_s=10.0, silence_s=60.0)
    net.cut_udp(0, [1])
    net.begin([np.ones(1000, np.float32)] * 2, [1.0, 0.0])

    net.run_for(11.0)

    assert "rank 1" in str(error_of(net, 0))


def test_a_peer_that_does_not_take_our_data_is_named() -> None:
    net = started(2, timeout_s=10.0, silence_s=60.0)
    net.cut_udp(1, [0])
    net.begin([np.ones(1000, np.float32)] * 2, [1.0, 0.0], ranks=[0])
    tell(
        net,
        1,
        0,
        ShardBegin(1, 0, 1, True, "float32", 1000, 1, 0.0, None, 1.0, 0.0, 1),
    )

    net.run_for(11.0)

    assert "rank 1" in str(error_of(net, 0))


def test_udp_that_dies_in_training_is_called_dead() -> None:
    net = started(2, timeout_s=600.0, silence_s=5.0)
    net.cut_udp(0, [1])
    net.begin([np.ones(1000, np.float32)] * 2, [1.0, 1.0])

    net.run_for(60.0)

    assert "while TCP works" in str(error_of(net, 1))


def test_a_rank_that_dies_is_named_on_all_others() -> None:
    net = started(4)
    net.begin([np.ones(1000, np.float32)] * 4, [1.0] * 4, ranks=[0, 1, 2])

    net.kill(3)
    net.run_for(1.0)

    for rank in range(3):
        error = error_of(net, rank)
        assert isinstance(error, PeerLostError)
        assert error.peers == ("rank 3",)


def test_after_a_failure_nothing_moves() -> None:
    net = started(2)
    net.ranks[0].fail(TailboundError("enough"))

    net.ranks[0].settle(net.now)
    net.ranks[0].handle_timer(net.now + 1e6)

    assert net.ranks[0].timer() is None
    event = net.ranks[0].next_event()
    assert isinstance(event, Failed)


def test_lossy_links_close_within_the_bound() -> None:
    net = started(
        3,
        LossBound.fixed(0.3),
        impairments=Impairments(losses=(IndependentLoss(rate=0.2),), delay_s=0.001),
        seed=5,
    )
    grads = [np.ones(50_000, np.float32) for _ in range(3)]

    events = net.all_reduce(grads, [1.0] * 3)

    assert grads[0].tobytes() == grads[1].tobytes() == grads[2].tobytes()
    missing = [event.reports[0].missing for event in events]
    assert all(0 < number <= 27 for number in missing)  # 0.3 of 92 chunks

"""Whole all-reduces with a deadline, over a network that loses 95 % for a while.

Times are virtual: what arrives at the server, or at a rank of a mesh, takes 2 ms, and
sending costs nothing. A bound of 5 % takes about 58 passes under 95 % loss: 0.12 s in
the server plan, whose answers come at once, and twice as long in a mesh.
"""

import math
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import RemoteError
from tailbound.impairments import BurstLoss, Impairments, IndependentLoss
from tailbound.protocol.events import Reduced
from tailbound.protocol.messages import BucketSpec
from tailbound.records import RoundReport
from tailbound.testing import FakeMesh, FakeNet

P = 0.05
ONE_WAY_S = 0.002
NUM = 36_200
"""100 chunks of 362 float32 at an MTU of 1500."""
Setting = float | Literal["auto"] | None


def bound_with(deadline_s: Setting, **settings: Any) -> LossBound:
    return LossBound(**({"p_low": P, "p_high": P, "deadline_s": deadline_s} | settings))


def losing(rounds: range) -> Impairments:
    """1 % of all datagrams, and 95 % of those of these rounds."""
    losses = (
        IndependentLoss(rate=0.01),
        BurstLoss(rate=0.95, rounds=tuple(rounds)),
    )
    return Impairments(losses=losses, delay_s=ONE_WAY_S)


def gradients(world_size: int, num: int, seed: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(num).astype(np.float32) for _ in range(world_size)]


def ways_in(events: list[Reduced]) -> list[RoundReport]:
    return [
        report
        for event in events
        for report in event.reports
        if report.direction == "in"
    ]


def slowest_s(reports: list[RoundReport]) -> float:
    return max(report.latency_s for report in reports)


# -- the server plan ---------------------------------------------------------------


def run_net(
    bound: LossBound, burst: range, rounds: int
) -> tuple[dict[int, list[RoundReport]], dict[int, float]]:
    """Reports of the way in, and the time, of each round; replicas are compared."""
    net = FakeNet(
        3, (BucketSpec("float32", ("w",), ((NUM,),)),), bound, to_server=losing(burst)
    )
    net.start()
    reports, took_s = {}, {}
    for counter in range(1, rounds + 1):
        grad_WN = gradients(3, NUM, counter)
        begun_s = net.now
        reports[counter] = ways_in(net.all_reduce(grad_WN, [1.0] * 3))
        took_s[counter] = net.now - begun_s
        assert all(grad_N.tobytes() == grad_WN[0].tobytes() for grad_N in grad_WN)
    net.close()
    return reports, took_s


@pytest.mark.slow
def test_while_loss_is_high_a_learned_deadline_holds_and_its_cost_is_told() -> None:
    burst = range(41, 51)
    calm = [*range(1, 41), *range(51, 61)]

    waits, waits_s = run_net(bound_with(None), burst, 60)
    cuts, cuts_s = run_net(bound_with("auto"), burst, 60)

    assert min(waits_s[counter] for counter in burst) > 0.1
    assert max(cuts_s[counter] for counter in burst) < 0.035  # 20 ms and round trips
    for counter in burst:
        for report in cuts[counter]:
            assert report.given_up == report.missing - 5 > 0
            assert report.missing < 100
    assert sum(report.given_up for n in calm for report in cuts[n]) == 0
    assert sum(report.given_up for row in waits.values() for report in row) == 0


@pytest.mark.slow
def test_loss_that_stays_is_learned_and_then_bounded_by_the_cap() -> None:
    burst = range(41, 141)
    bound = bound_with("auto", deadline_cap_s=0.08)

    reports, took_s = run_net(bound, burst, 140)

    assert max(took_s[counter] for counter in range(41, 73)) < 0.035
    assert max(took_s[counter] for counter in burst) < 0.08 + 0.01
    assert min(took_s[counter] for counter in range(75, 141)) > 0.07
    early = sum(report.given_up for n in range(41, 73) for report in reports[n])
    late = sum(report.given_up for n in range(75, 107) for report in reports[n])
    assert 0 < late < early


@pytest.mark.slow
def test_seconds_hold_from_the_first_round_on_and_for_an_exact_bound() -> None:
    bound = LossBound(p_low=0.0, p_high=0.0, deadline_s=0.05)

    reports, took_s = run_net(bound, range(1, 3), 4)

    assert max(took_s[1], took_s[2]) < 0.065
    for report in (*reports[1], *reports[2]):
        assert 0 < report.given_up == report.missing < 100
    assert sum(report.given_up for report in (*reports[3], *reports[4])) == 0


@pytest.mark.slow
def test_what_was_learned_does_not_cut_a_critical_phase_that_is_exact() -> None:
    """The detector looks for the first time after 80 rounds: all are critical."""
    bound = LossBound(p_low=0.0, p_high=0.4, frequency=80, deadline_s="auto")

    reports, took_s = run_net(bound, range(41, 44), 44)

    assert min(took_s[counter] for counter in (41, 42, 43)) > 0.1
    assert sum(report.missing for row in reports.values() for report in row) == 0


def test_a_gradient_of_which_nothing_arrived_is_waited_for() -> None:
    """A second later its first chunks arrive, and close it."""
    net = FakeNet(
        2,
        (BucketSpec("float32", ("w",), ((NUM,),)),),
        bound_with(0.05),
        to_server=losing(range(1, 2)),
    )
    net.start()
    net.cut_udp(from_ranks=[1])
    net.begin(gradients(2, NUM, 0), [1.0, 1.0])
    net.run_for(1.0)
    assert all(worker.next_event() is None for worker in net.workers)
    net.mend_udp()

    reports = ways_in(net.run_until(Reduced))

    assert [1.0 <= report.latency_s < 1.2 for report in reports] == [False, True]
    assert 0 < reports[1].given_up == reports[1].missing - 5 < 95


def test_a_gradient_of_which_nothing_ever_arrives_ends_the_job() -> None:
    net = FakeNet(
        2,
        (BucketSpec("float32", ("w",), ((NUM,),)),),
        bound_with(0.05),
        silence_s=3.0,
    )
    net.start()
    net.cut_udp(from_ranks=[1])

    with pytest.raises(RemoteError, match=r"no datagram arrived for 3\.0 s while TCP"):
        net.all_reduce(gradients(2, NUM, 0), [1.0, 1.0])


def test_a_slow_rank_and_one_with_nothing_are_no_business_of_a_deadline() -> None:
    """Rank 1 has nothing, rank 2 computes for a second longer."""
    net = FakeNet(
        3,
        (BucketSpec("float32", ("w",), ((NUM,),)),),
        bound_with(0.05),
        to_server=Impairments(delay_s=ONE_WAY_S),
    )
    net.start()
    grad_WN = gradients(3, NUM, 0)
    expected_N = (grad_WN[0] + grad_WN[2]) / np.float32(2)
    net.workers[0].all_reduce(grad_WN[0], 1.0, net.now)
    net.workers[1].all_reduce(grad_WN[1], 0.0, net.now)
    net.run_for(1.0)
    net.workers[2].all_reduce(grad_WN[2], 1.0, net.now)

    reports = ways_in(net.run_until(Reduced))

    assert [report.given_up for report in reports] == [0, 0]
    assert np.array_equal(grad_WN[1], expected_N)


# -- the mesh ----------------------------------------------------------------------


def run_mesh(
    bound: LossBound,
    burst: range,
    steps: int,
    sizes: tuple[int, ...] = (108_600, 76_000),
    world_size: int = 3,
) -> dict[int, list[RoundReport]]:
    """Reports of the way in of each round: two buckets a step, both under way."""
    net = FakeMesh(world_size, bound, impairments=losing(burst))
    net.start()
    reports: dict[int, list[RoundReport]] = {}
    for step in range(1, steps + 1):
        buckets = [
            gradients(world_size, num, 2 * step + slot)
            for slot, num in enumerate(sizes)
        ]
        for slot, grad_WN in enumerate(buckets):
            is_last = slot == len(sizes) - 1
            net.begin(grad_WN, [1.0] * world_size, step=step, is_last=is_last)
        events = [event for _ in sizes for event in net.run_until(Reduced)]
        for event in events:
            reports.setdefault(event.counter, []).extend(ways_in([event]))
        for grad_WN in buckets:
            assert all(grad_N.tobytes() == grad_WN[0].tobytes() for grad_N in grad_WN)
    net.close()
    return reports


@pytest.mark.slow
def test_in_a_mesh_every_owner_has_deadlines_of_its_own() -> None:
    """Two rounds a step, of 100 and 70 chunks a shard; 41 to 52 are steps 21 to 26."""
    burst = range(41, 53)
    calm = [*range(1, 41), *range(53, 61)]

    waits = run_mesh(bound_with(None), burst, 30)
    cuts = run_mesh(bound_with("auto"), burst, 30)

    assert min(slowest_s(waits[counter]) for counter in burst) > 0.2
    assert max(slowest_s(cuts[counter]) for counter in burst) < 0.05
    for counter in burst:
        for report in cuts[counter]:
            assert 0 < report.given_up < report.missing
    assert sum(report.given_up for n in calm for report in cuts[n]) == 0
    assert sum(report.given_up for row in waits.values() for report in row) == 0


@pytest.mark.slow
def test_in_a_mesh_loss_that_stays_is_bounded_by_the_cap() -> None:
    burst = range(18, 58)
    bound = bound_with("auto", deadline_cap_s=0.06)

    reports = run_mesh(bound, burst, 57, sizes=(NUM,), world_size=2)

    assert max(slowest_s(reports[counter]) for counter in burst) < 0.06 + 0.015
    assert all(
        sum(report.given_up for report in reports[counter]) > 0 for counter in burst
    )


@pytest.mark.slow
def test_a_gradient_that_is_ahead_of_its_bound_is_not_cut_before_it() -> None:
    """Rank 0 starts its second step 0.65 s before the others have closed the first.

    By then nearly all of its gradient is there; those of the others are cut as ever.
    """
    net = FakeMesh(3, bound_with(0.05), impairments=losing(range(1, 3)), seed=2)
    net.start()
    first, second = gradients(3, 54_300, 0), gradients(3, 54_300, 1)
    net.begin(first, [1.0] * 3, step=1)
    for rank in range(3):
        net.run_until(Reduced, ranks=[rank])
        net.begin(second, [1.0] * 3, ranks=[rank], step=2)

    ahead, *others = ways_in(net.run_until(Reduced))

    assert ahead.given_up == 0
    assert ahead.latency_s == pytest.approx(0.656)
    for report in others:
        assert report.given_up > 0
        assert report.latency_s < 0.06


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_loss_records_say_what_was_given_up(seed: int) -> None:
    """A deadline bounds every way in; the share beyond p is what the report says."""
    rng = np.random.default_rng(seed)
    world_size, num = int(rng.integers(2, 5)), int(rng.integers(1, 20_000))
    p, limit_s = float(rng.choice([0.0, 0.1, 0.4])), float(rng.choice([0.01, 0.05]))
    rate = float(rng.choice([0.0, 0.3, 0.7, 0.9]))
    net = FakeMesh(
        world_size,
        bound_with(
            limit_s, p_low=p, p_high=p, order=str(rng.choice(["rotate", "norm"]))
        ),
        impairments=Impairments(
            losses=(IndependentLoss(rate=rate),),
            delay_s=ONE_WAY_S,
            jitter_s=float(rng.choice([0.0, 0.001])),
            duplicate_share=float(rng.choice([0.0, 0.1])),
        ),
        seed=seed,
    )
    net.start()
    for step in range(1, 4):
        grad_WN = gradients(world_size, num, step)
        events = net.all_reduce(grad_WN, [1.0] * world_size, step=step)

        assert all(grad_N.tobytes() == grad_WN[0].tobytes() for grad_N in grad_WN)
        for report in ways_in(events):
            assert report.given_up <= report.missing < max(2, report.num_chunks)
            assert report.missing - report.given_up <= math.floor(
                p * report.num_chunks + 1e-9
            )
            if rate == 0.0:
                assert report.given_up == 0

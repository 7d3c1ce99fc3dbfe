"""How many copies of a missing chunk leave: expected values counted by hand."""

import pytest

from tailbound.config import LossBound
from tailbound.protocol.events import Direction
from tailbound.protocol.repair import Repair, Repairs, cheapest, copies_needed, spread


@pytest.mark.parametrize(
    ("missing", "allowed", "loss", "copies"),
    [
        # 1000 * 0.7**16 = 3.32 and twice its root 3.65 are below 8; 0.7**15: 9.10.
        (1000, 8, 0.7, 16),
        (700, 8, 0.7, 15),
        (1000, 1000, 0.7, 1),
        # One chunk, none to spare: e + 2 sqrt(e) <= 0.1 from e = 0.5**9 = 0.00195 on.
        (1, 0, 0.5, 9),
        # 0.99**24 still leaves 786 of them: a path that is dead.
        (1000, 0, 0.99, 24),
    ],
)
def test_so_many_copies_most_likely_end_the_round(
    missing: int, allowed: int, loss: float, copies: int
) -> None:
    assert copies_needed(missing, allowed, loss) == copies


@pytest.mark.parametrize(
    ("needed", "num_passes", "loss", "cost", "first"),
    [
        (9, 1, 0.5, 9.0, 9),
        # 2 now and, for a quarter of the chunks, 7.
        (9, 2, 0.5, 3.75, 2),
        # 1, then 2 for a half, 6 for an eighth.
        (9, 3, 0.5, 2.75, 1),
        # 2, 4 * 0.49, 9 * 0.7**6.
        (15, 3, 0.7, 5.018841, 2),
    ],
)
def test_copies_are_spread_at_the_least_cost_later_passes_larger(
    needed: int, num_passes: int, loss: float, cost: float, first: int
) -> None:
    found_cost, found_first = cheapest(needed, num_passes, loss)

    assert found_cost == pytest.approx(cost)  # sums of up to three rounded products
    assert found_first == first


@pytest.mark.parametrize(
    ("room", "first"), [(9.0, 9), (8.9, 2), (3.75, 2), (3.7, 1), (0.9, 1)]
)
def test_a_pass_takes_what_the_budget_has_room_for(room: float, first: int) -> None:
    assert spread(9, 0.5, room) == first


def test_a_burst_on_a_clean_link_is_repaired_in_few_passes() -> None:
    """Plain, 16 passes would take 1000 * (1 - 0.7**16) / 0.3 = 3322 datagrams.

    1.4 times that, less the 1000 sent, is 5.2 for each of 700 chunks: room for three
    passes of 2, 4 and 9 copies, not for two of 4 and 11 (6.6).
    """
    burst = Repair().begin(1000)

    assert burst.next_copies(missing=700, allowed=8, sent=1000) == 2
    # 343 left of 700 after two copies: the loss is 0.7 still.
    assert burst.next_copies(missing=343, allowed=8, sent=2400) == 4


def test_what_is_usual_on_a_link_is_no_burst() -> None:
    link = Repair()
    for _ in range(50):
        link.note(0.3)

    assert link.begin(1000).next_copies(missing=300, allowed=0, sent=1000) == 1
    assert not link.is_burst(0.59)
    assert link.is_burst(0.61)


def test_a_loss_that_is_small_in_itself_is_no_burst() -> None:
    assert not Repair().is_burst(0.09)
    assert Repair().is_burst(0.1)


def test_nothing_that_came_through_is_no_reason_to_send_more() -> None:
    assert Repair().begin(100).next_copies(missing=100, allowed=0, sent=100) == 1


def test_few_chunks_say_less_of_the_loss_than_the_pass_before_them() -> None:
    """Ten that all stay away would be a dead path; a pass that lost half says no.

    The loss is then 1.0 * 10 / 30 + 0.5 * 20 / 30 = 0.67: more than one copy leaves.
    """
    burst = Repair().begin(20)
    assert burst.next_copies(missing=10, allowed=0, sent=20) == 2

    assert burst.next_copies(missing=10, allowed=0, sent=40) > 1


def test_each_peer_and_direction_has_a_memory_of_its_own_over_rounds() -> None:
    repairs = Repairs(LossBound(repair="burst"))

    one = repairs.of(1, Direction.IN)

    assert one is not None
    assert repairs.of(1, Direction.IN) is one
    assert repairs.of(2, Direction.IN) is not one
    assert repairs.of(1, Direction.BACK) is not one


def test_plain_repair_keeps_none() -> None:
    assert Repairs(LossBound()).of(1, Direction.IN) is None

"""What a deadline learns from the rounds before: literals, then properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.config import LossBound
from tailbound.protocol.deadline import (
    Deadlines,
    FixedDeadline,
    LearnedDeadline,
)

AUTO = LossBound(p_low=0.01, p_high=0.4, deadline_s="auto", deadline_cap_s=3.0)


def learned(
    durations_s: list[float], *, cut: int = 0, k: float = 4.0, cap_s: float = 5.0
) -> LearnedDeadline:
    """A deadline that saw these rounds end by themselves, and then some cut ones."""
    deadline = LearnedDeadline(k, cap_s)
    for duration_s in durations_s:
        deadline.note(duration_s, is_cut=False)
    for _ in range(cut):
        deadline.note(min(deadline.limit_s, 1.0), is_cut=True)
    return deadline


# -- the limit -------------------------------------------------------------------


def test_fifteen_rounds_say_nothing_and_sixteen_do() -> None:
    assert learned([0.1] * 15).limit_s == math.inf
    assert learned([0.1] * 16).limit_s == 0.2


def test_the_limit_is_the_median_and_k_deviations() -> None:
    """Median 0.4; half of the rounds are 0.3 or more away, so 1.4826 x 0.3 each."""
    durations_s = [0.1, 0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4] * 2 + [0.7] * 10

    assert learned(durations_s, k=2.0).limit_s == pytest.approx(0.4 + 2 * 0.44478)
    assert learned(durations_s, k=4.0).limit_s == pytest.approx(0.4 + 4 * 0.44478)


def test_rounds_that_hardly_differ_may_take_twice_as_long() -> None:
    assert learned([0.3, 0.3, 0.3, 0.31] * 4).limit_s == 0.6


@pytest.mark.parametrize(
    ("duration_s", "limit_s"), [(0.0, 0.02), (0.001, 0.021), (0.019, 0.039)]
)
def test_short_rounds_may_take_20_ms_more(duration_s: float, limit_s: float) -> None:
    assert learned([duration_s] * 16).limit_s == pytest.approx(limit_s)


def test_a_few_long_rounds_move_nothing() -> None:
    assert learned([0.1] * 13 + [4.0] * 3).limit_s == 0.2


def test_the_cap_is_hard() -> None:
    assert learned([0.1] * 16, cap_s=0.19).limit_s == 0.19
    assert learned([0.1] * 16, cap_s=0.05).limit_s == 0.05


def test_only_the_last_64_rounds_count() -> None:
    """Of the last 64 rounds, 31 and then 33 take one second."""
    deadline = learned([0.1] * 100 + [1.0] * 31)
    assert deadline.limit_s == 0.2
    deadline.note(1.0, is_cut=False)
    deadline.note(1.0, is_cut=False)
    assert deadline.limit_s == 2.0


# -- rounds that were cut ----------------------------------------------------------


def test_once_half_of_the_rounds_were_cut_the_cap_alone_holds() -> None:
    assert learned([0.1] * 64, cut=31).limit_s == 0.2
    assert learned([0.1] * 64, cut=32).limit_s == 5.0


def test_a_young_deadline_counts_cut_rounds_alike() -> None:
    """Of 33 rounds the 17th in order is the median; of 32 it is between two."""
    assert learned([0.1] * 17, cut=16).limit_s == 0.2
    assert learned([0.1] * 17, cut=17).limit_s == 5.0


def test_a_network_that_became_slower_for_good_is_learned_anew() -> None:
    """32 rounds are cut, 33 run under the cap, and then the limit fits."""
    deadline = learned([0.01] * 100)
    ends = []
    for _ in range(100):
        is_cut = deadline.limit_s < 0.1
        ends.append((is_cut, deadline.limit_s))
        deadline.note(0.1, is_cut=is_cut)

    assert [is_cut for is_cut, _ in ends] == [True] * 32 + [False] * 68
    assert [limit_s for _, limit_s in ends[:32]] == [0.03] * 32
    assert [limit_s for _, limit_s in ends[32:65]] == [5.0] * 33
    assert [limit_s for _, limit_s in ends[65:]] == [0.2] * 35


def test_a_burst_that_passes_leaves_the_limit_as_it_was() -> None:
    deadline = learned([0.01] * 64, cut=20)
    for _ in range(64):
        assert deadline.limit_s == 0.03
        deadline.note(0.01, is_cut=False)

    assert deadline.limit_s == 0.03


duration = st.floats(0.0, 100.0)


@given(
    st.lists(st.tuples(duration, st.booleans()), max_size=150),
    st.floats(0.1, 20.0),
    st.floats(0.001, 10.0),
)
def test_a_limit_is_between_the_least_slack_and_the_cap(
    rounds: list[tuple[float, bool]], k: float, cap_s: float
) -> None:
    deadline = LearnedDeadline(k, cap_s)
    for number, (duration_s, is_cut) in enumerate(rounds, 1):
        deadline.note(duration_s, is_cut=is_cut)

        if number < 16:
            assert deadline.limit_s == math.inf
        else:
            assert min(0.02, cap_s) <= deadline.limit_s <= cap_s


@given(st.lists(st.floats(0.0, 4.9), min_size=1, max_size=300))
def test_no_more_than_half_of_a_window_is_cut_below_the_cap(
    durations_s: list[float],
) -> None:
    """Whatever the network does, if its rounds end within the cap by themselves."""
    deadline = LearnedDeadline(4.0, 5.0)
    cuts = []
    for duration_s in durations_s:
        is_cut = duration_s > deadline.limit_s
        cuts.append(is_cut)
        deadline.note(min(duration_s, deadline.limit_s), is_cut=is_cut)

    for stop in range(1, len(cuts) + 1):
        assert sum(cuts[max(0, stop - 64) : stop]) <= 32


@given(st.permutations([0.01 * number for number in range(40)]))
def test_the_order_of_a_windows_rounds_does_not_matter(
    durations_s: list[float],
) -> None:
    """Median 0.195; 20 of the 40 are within 0.095 of it and 20 further away."""
    expected = 0.195 + 4 * 1.4826 * 0.1

    assert learned(durations_s).limit_s == pytest.approx(expected)


# -- which deadline holds ------------------------------------------------------------


def test_without_the_option_there_is_none() -> None:
    assert Deadlines(LossBound()).of(0, 1, 0.4, 100) is None


@pytest.mark.parametrize("p", [0.0, 0.008, 0.408])
def test_seconds_hold_for_every_bound_and_learn_nothing(p: float) -> None:
    deadline = Deadlines(LossBound(p_low=0.0, deadline_s=0.25)).of(0, 1, p, 100)
    assert isinstance(deadline, FixedDeadline)

    for _ in range(64):
        deadline.note(9.0, is_cut=True)

    assert deadline.limit_s == 0.25


def test_an_exact_bound_is_not_cut_by_what_was_learned() -> None:
    bound = LossBound(p_low=0.0, p_high=0.4, deadline_s="auto")

    assert Deadlines(bound).of(0, 1, 0.0, 100) is None
    assert Deadlines(bound).of(0, 1, 0.4, 100) is not None


def test_what_was_learned_comes_back_with_the_settings() -> None:
    bound = LossBound(deadline_s="auto", deadline_k=8.0, deadline_cap_s=1.5)
    first = Deadlines(bound).of(0, 1, 0.4, 100)
    assert first is not None
    for number in range(32):
        first.note(0.1 if number % 2 else 0.3, is_cut=False)

    assert first.limit_s == pytest.approx(0.2 + 8 * 1.4826 * 0.1)
    for _ in range(64):
        first.note(0.1, is_cut=True)
    assert first.limit_s == 1.5


@pytest.mark.parametrize(
    "other",
    [(1, 1, 0.4, 100), (0, 2, 0.4, 100), (0, 1, 0.01, 100)],
    ids=["place in the step", "peer", "bound"],
)
def test_each_place_peer_and_bound_learns_for_itself(
    other: tuple[int, int, float, int],
) -> None:
    deadlines = Deadlines(AUTO)
    for _ in range(16):
        first = deadlines.of(0, 1, 0.4, 100)
        assert first is not None
        first.note(0.5, is_cut=False)
    second = deadlines.of(*other)
    again = deadlines.of(0, 1, 0.4, 100)

    assert second is not None
    assert again is not None
    assert (again.limit_s, second.limit_s) == (1.0, math.inf)


def test_a_bucket_of_another_size_starts_anew() -> None:
    deadlines = Deadlines(AUTO)
    first = deadlines.of(0, 1, 0.4, 100)
    assert first is not None
    for _ in range(16):
        first.note(0.5, is_cut=False)

    larger = deadlines.of(0, 1, 0.4, 101)

    assert larger is not None
    assert larger.limit_s == math.inf
    assert deadlines.of(0, 1, 0.4, 101) is larger

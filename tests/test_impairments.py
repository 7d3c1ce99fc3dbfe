"""Loss models, the impaired link and the delay line."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailbound.errors import ConfigError
from tailbound.impairments import (
    BurstLoss,
    DelayLine,
    GilbertElliottLoss,
    ImpairedLink,
    Impairments,
    IndependentLoss,
    LossModel,
)

BATCH = 44
MANY = 20_000


def make_link(*losses: LossModel, seed: int = 7, **fields: float) -> ImpairedLink:
    impairments = Impairments(losses=losses, **fields)  # type: ignore[arg-type]
    return ImpairedLink(impairments, np.random.default_rng(seed))


def round_of(num: int, counter: int = 1) -> Any:
    return np.full(num, counter, dtype=np.uint32)


def runs_of_loss(keep_K: Any) -> list[int]:
    text = "".join("." if kept else "x" for kept in keep_K)
    return [len(run) for run in text.split(".") if run]


def test_without_impairments_everything_arrives_once_and_at_once() -> None:
    link = make_link()

    assert Impairments().is_none
    assert link.keep(round_of(BATCH)).tolist() == [True] * BATCH
    assert link.delay_s(3).tolist() == [0.0, 0.0, 0.0]
    assert link.copies(3).tolist() == [1, 1, 1]
    assert link.control_delay_s() == 0.0


@pytest.mark.parametrize(
    "impairments",
    [
        Impairments(losses=(IndependentLoss(rate=0.1),)),
        Impairments(delay_s=0.001),
        Impairments(jitter_s=0.001),
        Impairments(reorder_share=0.1),
        Impairments(duplicate_share=0.1),
    ],
)
def test_each_setting_alone_is_an_impairment(impairments: Impairments) -> None:
    assert not impairments.is_none


@pytest.mark.parametrize(
    ("impairments", "expected"),
    [
        (Impairments(delay_s=0.5, duplicate_share=0.5), True),
        (Impairments(jitter_s=0.001), False),
        (Impairments(reorder_share=0.1), False),
    ],
)
def test_delay_is_constant_without_jitter_and_reordering(
    impairments: Impairments, expected: bool
) -> None:
    assert impairments.has_constant_delay is expected


def test_independent_loss_drops_its_share() -> None:
    kept = make_link(IndependentLoss(rate=0.7)).keep(round_of(MANY))

    assert kept.dtype == np.bool_
    assert kept.mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(("rate", "kept"), [(0.0, MANY), (1.0, 0)])
def test_a_rate_of_zero_or_one_is_exact(rate: float, kept: int) -> None:
    assert make_link(IndependentLoss(rate=rate)).keep(round_of(MANY)).sum() == kept


def test_gilbert_elliott_loses_in_bursts_of_the_bad_state() -> None:
    """Bad for 0.02 / (0.02 + 0.18) = 10 %, 1 / 0.18 = 5.6 datagrams at a time."""
    kept = make_link(GilbertElliottLoss(to_bad=0.02, to_good=0.18)).keep(round_of(MANY))

    runs = runs_of_loss(kept)
    assert kept.mean() == pytest.approx(0.9, abs=0.01)
    assert sum(runs) / len(runs) == pytest.approx(5.6, abs=0.6)


def test_gilbert_elliott_loses_at_each_states_own_rate() -> None:
    """Half of the time bad: (0.1 + 0.5) / 2 lost."""
    loss = GilbertElliottLoss(to_bad=0.1, to_good=0.1, loss_good=0.1, loss_bad=0.5)

    assert make_link(loss).keep(round_of(MANY)).mean() == pytest.approx(0.7, abs=0.015)


def test_gilbert_elliott_alternates_when_it_always_leaves() -> None:
    link = make_link(GilbertElliottLoss(to_bad=1.0, to_good=1.0))

    assert link.keep(round_of(5)).tolist() == [True, False, True, False, True]
    assert link.keep(round_of(3)).tolist() == [False, True, False]


def test_gilbert_elliott_stays_good_without_a_way_to_bad() -> None:
    assert (
        make_link(GilbertElliottLoss(to_bad=0.0, to_good=0.5))
        .keep(round_of(MANY))
        .all()
    )


def test_gilbert_elliott_stays_bad_without_a_way_back() -> None:
    link = make_link(GilbertElliottLoss(to_bad=1.0, to_good=0.0))

    assert link.keep(round_of(4)).tolist() == [True, False, False, False]
    assert not link.keep(round_of(MANY)).any()


def test_burst_drops_only_datagrams_of_its_rounds() -> None:
    link = make_link(BurstLoss(rate=1.0, rounds=(651, 279)))
    counter_K = np.array([278, 279, 280, 650, 651, 652, 279], dtype=np.uint32)

    kept = link.keep(counter_K)

    assert kept.tolist() == [True, False, True, True, False, True, False]


def test_burst_drops_its_share_of_a_round() -> None:
    kept = make_link(BurstLoss(rate=0.7, rounds=(3,))).keep(round_of(MANY, counter=3))

    assert kept.mean() == pytest.approx(0.3, abs=0.01)


def test_burst_without_rounds_drops_nothing() -> None:
    assert make_link(BurstLoss(rate=1.0, rounds=())).keep(round_of(BATCH)).all()


def test_datagram_is_lost_if_any_model_drops_it() -> None:
    """Kept with 0.8 * 0.5 in the burst, with 0.8 outside."""
    link = make_link(IndependentLoss(rate=0.2), BurstLoss(rate=0.5, rounds=(2,)))

    assert link.keep(round_of(MANY, counter=1)).mean() == pytest.approx(0.8, abs=0.01)
    assert link.keep(round_of(MANY, counter=2)).mean() == pytest.approx(0.4, abs=0.01)


ALL_LOSSES = (
    IndependentLoss(rate=0.2),
    GilbertElliottLoss(to_bad=0.1, to_good=0.3),
    BurstLoss(rate=0.5, rounds=(1,)),
)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_what_is_lost_does_not_depend_on_the_batches(sizes: list[int]) -> None:
    parts = make_link(*ALL_LOSSES, jitter_s=0.1, duplicate_share=0.5)
    whole = make_link(*ALL_LOSSES)

    kept: list[bool] = []
    for size in sizes:
        kept += parts.keep(round_of(size)).tolist()
        parts.delay_s(size)
        parts.copies(size)

    assert kept == whole.keep(round_of(sum(sizes))).tolist()


def test_same_seed_gives_the_same_draws_and_another_seed_others() -> None:
    kept = [
        make_link(*ALL_LOSSES, seed=s).keep(round_of(200)).tolist() for s in (1, 1, 2)
    ]

    assert kept[0] == kept[1]
    assert kept[0] != kept[2]


def test_constant_delay_is_the_one_way_delay() -> None:
    link = make_link(delay_s=0.0005)

    delay_K = link.delay_s(BATCH)

    assert delay_K.dtype == np.float64
    assert delay_K.tolist() == [0.0005] * BATCH
    assert link.control_delay_s() == 0.0005


def test_jitter_is_uniform_on_top_of_the_delay() -> None:
    delay_K = make_link(delay_s=0.010, jitter_s=0.004).delay_s(MANY)

    assert 0.010 <= delay_K.min() < 0.0101
    assert 0.0139 < delay_K.max() <= 0.014
    assert delay_K.mean() == pytest.approx(0.012, abs=0.0001)


def test_control_messages_have_jitter_too() -> None:
    link = make_link(delay_s=0.010, jitter_s=0.004)

    delays = [link.control_delay_s() for _ in range(1000)]

    assert 0.010 <= min(delays) < max(delays) <= 0.014
    assert sum(delays) / 1000 == pytest.approx(0.012, abs=0.0002)


@pytest.mark.parametrize(("delay_s", "held_s"), [(0.010, 0.020), (0.0, 0.001)])
def test_reordered_share_is_held_back_by_the_delay_or_a_millisecond(
    delay_s: float, held_s: float
) -> None:
    delay_K = make_link(delay_s=delay_s, reorder_share=0.25).delay_s(MANY)

    assert set(delay_K.tolist()) == {delay_s, held_s}
    assert (delay_K == held_s).mean() == pytest.approx(0.25, abs=0.01)


def test_duplicated_share_arrives_twice() -> None:
    copies_K = make_link(duplicate_share=0.25).copies(MANY)

    assert set(copies_K.tolist()) == {1, 2}
    assert copies_K.mean() == pytest.approx(1.25, abs=0.01)


def test_empty_batch_gives_empty_answers() -> None:
    link = make_link(*ALL_LOSSES, jitter_s=0.1, reorder_share=0.5, duplicate_share=0.5)

    assert link.keep(round_of(0)).shape == (0,)
    assert link.delay_s(0).shape == (0,)
    assert link.copies(0).shape == (0,)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_zero_to_one_is_refused_by_name(share: float) -> None:
    for name in ("reorder_share", "duplicate_share"):
        with pytest.raises(ConfigError, match=name):
            Impairments(**{name: share})  # type: ignore[arg-type]
    for name in ("to_bad", "to_good", "loss_good", "loss_bad"):
        with pytest.raises(ConfigError, match=name):
            GilbertElliottLoss(**{"to_bad": 0.1, "to_good": 0.1, name: share})
    with pytest.raises(ConfigError, match="loss rate"):
        IndependentLoss(rate=share)
    with pytest.raises(ConfigError, match="burst rate"):
        BurstLoss(rate=share, rounds=(1,))


@pytest.mark.parametrize("seconds", [-0.001, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["delay_s", "jitter_s"])
def test_a_delay_that_is_no_time_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0 or more seconds"):
        Impairments(**{name: seconds})  # type: ignore[arg-type]


def test_a_burst_in_round_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="burst rounds count from 1, not 0"):
        BurstLoss(rate=0.7, rounds=(3, 0))


def test_what_is_no_loss_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"losses holds .*not 0\.1"):
        Impairments(losses=(0.1,))  # type: ignore[arg-type]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed is 0 or more, not -1"):
        Impairments(seed=-1)


def test_impairments_survive_pickling() -> None:
    impairments = Impairments(losses=ALL_LOSSES, delay_s=0.001, seed=5)

    assert pickle.loads(pickle.dumps(impairments)) == impairments


def test_delay_line_gives_what_is_due_in_order_of_due_time() -> None:
    line: DelayLine[str] = DelayLine()
    for due_s, item in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        line.push(due_s, item)

    assert line.next_due_s() == 1.0
    assert line.pop_due(0.999) == []
    assert line.pop_due(2.0) == ["a", "b"]
    assert len(line) == 1
    assert line.pop_due(9.0) == ["c"]
    assert line.next_due_s() is None
    assert len(line) == 0


def test_delay_line_keeps_the_order_of_pushes_for_ties_and_never_compares_items() -> (
    None
):
    line: DelayLine[object] = DelayLine()
    first, second, third = object(), object(), object()
    for item in (first, second, third):
        line.push(1.0, item)

    assert line.pop_due(1.0) == [first, second, third]

"""The ledger: rounds add up to steps, and steps decide the next bound."""

import math

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.protocol.ledger import RoundSum, StepLedger, sum_round
from tailbound.protocol.messages import ShardBegin, ShardMean

BOUND = LossBound(p_low=0.1, p_high=0.4, frequency=1, eta=0.5, correct_holes=False)


def part(
    index: int,
    *squares: float,
    is_last: bool = True,
    total_weight: float = 1.0,
    num_chunks: int = 10,
    missing: int = 0,
    loss_scale: float = 1.0,
) -> RoundSum:
    return RoundSum(
        index,
        index + 1,
        is_last,
        total_weight,
        np.array(squares),
        num_chunks,
        missing,
        loss_scale,
        None,
    )


def test_what_the_owners_told_is_added_up() -> None:
    begin = ShardBegin(5, 0, 1, True, "float32", 9, 2, 1.0, 0.1, 8.0, 1.0, 1)
    means = [
        ShardMean(5, 0, (1.0, 0.0), 20, 3),
        ShardMean(5, 0, (2.0, 4.0), 10, 0),
    ]

    total = sum_round(4, begin, means)

    assert total.square_L.tolist() == [3.0, 4.0]
    assert (total.num_chunks, total.missing, total.share_received) == (30, 3, 0.9)
    assert (total.index, total.counter, total.is_last) == (4, 5, True)
    assert (total.loss_scale, total.learning_rate) == (8.0, 0.1)
    assert total.total_weight == 1.0


def test_a_round_in_which_nobody_had_anything_adds_nothing() -> None:
    begin = ShardBegin(5, 0, 1, True, "float32", 9, 1, 0.0, None, 1.0, 0.0, 1)

    total = sum_round(4, begin, [])

    assert (total.total_weight, total.share_received) == (0.0, 1.0)


def test_a_step_is_decided_when_all_its_rounds_are_in() -> None:
    ledger = StepLedger(BOUND)
    assert ledger.bound_of(1) == 0.1

    assert ledger.add(part(1, 16.0)) is None
    decision = ledger.add(part(0, 9.0, is_last=False))

    assert decision is not None
    assert (decision.norm, decision.counter) == (5.0, 2)
    assert decision.verdict == "no check: too few norms to compare"


def test_rounds_of_a_later_step_wait_for_its_own_last_one() -> None:
    ledger = StepLedger(BOUND)

    assert ledger.add(part(0, 9.0, is_last=False)) is None
    assert ledger.add(part(2, 1.0, is_last=False)) is None
    assert ledger.add(part(1, 16.0)) is not None
    assert ledger.add(part(3, 1.0)) is not None


def test_the_bound_of_the_next_step_is_unknown_until_then() -> None:
    ledger = StepLedger(BOUND)
    assert ledger.bound_of(1) == 0.1
    assert ledger.bound_of(2) is None

    ledger.add(part(0, 25.0))
    assert ledger.bound_of(2) == 0.1
    ledger.add(part(1, 25.0))

    assert ledger.bound_of(3) == 0.4
    assert not ledger.critical


def test_a_step_without_anything_decides_nothing() -> None:
    ledger = StepLedger(BOUND)

    decision = ledger.add(part(0, 0.0, total_weight=0.0))

    assert decision is not None
    assert decision.verdict == "skipped: no rank had anything"
    assert (decision.p, decision.critical) == (0.1, True)


def test_each_tensors_norm_is_compared_if_so_set() -> None:
    ledger = StepLedger(
        LossBound(p_low=0.1, p_high=0.4, frequency=1, eta=0.5, per_layer=True)
    )
    ledger.add(part(0, 4.0, 100.0))

    decision = ledger.add(part(1, 1.0, 100.0))

    # The small tensor's norm fell from 2 to 1, the whole one's from 10.2 to 10.05.
    assert decision is not None
    assert decision.ratio == 0.5


@pytest.mark.parametrize(
    ("correct", "expected"), [(False, 2.0), (True, 2.0 / math.sqrt(0.64))]
)
def test_a_rounds_norm_is_unscaled_and_corrected(
    correct: bool, expected: float
) -> None:
    ledger = StepLedger(LossBound(correct_holes=correct))

    norm = ledger.norm_of(part(0, 100.0, num_chunks=100, missing=36, loss_scale=5.0))

    assert norm == pytest.approx(expected, rel=1e-12)

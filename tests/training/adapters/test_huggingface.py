"""Hugging Face's Trainer and Accelerate: two ranks in processes, exact values."""

from typing import Any

import pytest

from training.adapters.launch import run_ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.sockets,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]
Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told() -> Told:
    """What each rank found, by the name of the function."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="the extra 'adapters' is not installed")
    return run_ranks("huggingface_ranks.py")


def test_s04_a_step_has_one_denominator_over_all_ranks(told: Told) -> None:
    """4, three 1s; ten 2s, two 8s: 43 / 16, as with the Trainer alone."""
    assert [one["items"] for one in told] == 2 * [[[2.6875], 2.0, [4, 4]]]


def test_dropped_items_leave_the_denominator(told: Told) -> None:
    """4, three 1s, two 5s: 17 / 6. Ten 2s, (two 8s), four 7s: 48 / 14. 65 / 20."""
    for one in told:
        grads, total_weight, counts = one["items_dropped"]
        assert grads == [pytest.approx(3.25, 1e-6)]
        assert total_weight == pytest.approx(2 * 20 / 22)  # of two ranks' 22 items
        assert counts == [5, 6]


def test_dropped_items_leave_a_denominator_of_each_rank(told: Told) -> None:
    """17 / 6 in full, and 48 / 16 that counts 14 / 16."""
    for one in told:
        grads, total_weight, counts = one["items_of_each_rank"]
        assert grads == [pytest.approx((17 / 6 + 48 / 16) / (1 + 14 / 16), 1e-6)]
        assert total_weight == 1.875
        assert counts == [5, 6]


def test_dropped_micro_batches_leave_the_denominator(told: Told) -> None:
    """Means of 4, 1, 5 and 2, (8), 7: 19 / 5."""
    for one in told:
        grads, total_weight, counts = one["means_dropped"]
        assert grads == [pytest.approx(3.8, 1e-6)]
        assert total_weight == pytest.approx(5 / 3)
        assert counts == [5, 6]


def test_s03_a_short_window_counts_in_full(told: Told) -> None:
    assert [one["last_window"] for one in told] == 2 * [[[3.0, 3.0], 2.0, [2, 2]]]


def test_s03_a_short_window_of_accelerate_counts_in_full(told: Told) -> None:
    """(3 + 9 + 1 + 3) / 4, then (5 + 7) / 2 where Accelerate alone gives 3."""
    assert [one["accelerate"] for one in told] == 2 * [[4.0, 6.0]]


def test_dropped_weights_leave_accelerates_denominator(told: Told) -> None:
    """1 of 2, 2 of 6, 3 of 1; 1 of 10, (2 of 14), 3 of 3: (17 + 19) / (6 + 4)."""
    assert [one["accelerate_dropped"] for one in told] == 2 * [
        [pytest.approx(3.6, 1e-6)]
    ]


def test_a_micro_batch_may_run_the_model_twice(told: Told) -> None:
    """Twice the mean of 3, 5, 1 and 7."""
    assert [one["twice"] for one in told] == 2 * [[8.0, 4, 4]]


def test_a_loop_that_accumulates_by_itself_keeps_its_denominator(told: Told) -> None:
    assert [one["by_hand"] for one in told] == 2 * [[4.0]]


def test_reducing_in_each_micro_batch_is_refused(told: Told) -> None:
    for one in told:
        assert one["each_batch"].startswith("sync_each_batch reduces before a step's")


def test_an_error_on_one_rank_is_told_to_the_other(told: Told) -> None:
    assert [one["failed"] for one in told] == [
        "RemoteError: rank 1 ended the job: ValueError: no such label",
        "no such label",
    ]

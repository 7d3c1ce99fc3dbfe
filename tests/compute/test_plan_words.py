"""A plan in words: what is said in which case."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tailbound.compute.plan_words import advice, headline, percent, seconds, sentences
from tailbound.compute.planner import plan
from tailbound.compute.plans import Outcome, Plan
from tailbound.compute.traces import Trace

FREE = Outcome(
    speedup=1.3,
    threshold_s=4.0,
    dropped_share=0.2,
    iteration_ratio=1.25,
    baseline_step_s=6.0,
    step_s=4.0,
)
NOTHING = replace(FREE, threshold_s=None, speedup=1.0, dropped_share=0.0, step_s=6.0)


@pytest.fixture(scope="module")
def moving() -> Plan:
    """The specification's worked example; nothing estimated."""
    latency_s_SWM = np.array([[[1.0, 1, 1], [1, 1, 4]], [[1, 2, 1], [1, 1, 1]]])
    trace = Trace(latency_s_SWM, None, ("a", "b"), (0, 1))
    return plan(trace, comm_s=1.0, max_drop=1.0, num_workers=[2])


def changed(base: Plan, **fields: Any) -> Plan:
    return replace(base, **fields)


def text(found: Plan) -> str:
    return " ".join(sentences(found))


def test_a_gain_is_told_with_its_price_and_the_line_to_paste(moving: Plan) -> None:
    assert headline(moving) == (
        "DropCompute would get 25 % more done per second, with a threshold of 3 s and "
        "16.7 % dropped"
    )
    assert (
        "In the trace (2 steps, 2 workers, 3 micro-batches) the slowest worker of a "
        "step computes 1.25× as long as the average one: 20 % of the compute time is "  # noqa: RUF001
        "waiting. Bounded, a step takes 4 s on average instead of 6 s, and 16.7 % of "
        "the micro-batches are dropped: 1.25× in all."  # noqa: RUF001
    ) in text(moving)
    assert advice(moving) == (
        "Write: tailbound.attach(model, optimizer, micro_batches=3, "
        'compute=tailbound.ComputeBound(threshold_s="auto", max_drop=1.0, '
        'preempt="backward"))'
    )


def test_the_whole_verdict_is_headline_sentences_and_advice(moving: Plan) -> None:
    assert moving.verdict == f"{headline(moving)}. {text(moving)} {advice(moving)}"


def test_nothing_to_gain_is_told(moving: Plan) -> None:
    none = changed(
        moving, threshold_s=None, speedup=1.0, dropped_share=0.0, finishing=NOTHING
    )
    little = changed(none, speedup=1.009, threshold_s=3.0)

    for found in (none, little):
        assert headline(found) == ("No threshold would make this job noticeably faster")
        assert "Bounded" not in text(found)
        assert advice(found).startswith("Leave the bound off")


def test_finishing_what_runs_at_the_threshold_is_told_beside_leaving_it(
    moving: Plan,
) -> None:
    left = text(changed(moving, finishing=FREE))
    lost = text(changed(moving, finishing=NOTHING))

    told = (
        'Here a micro-batch that runs at the threshold is left (preempt="backward"). '
        'If it is finished (preempt="micro_batch", the default)'
    )
    assert f"{told}: 1.30×, with a threshold of 4 s and 20 % dropped." in left  # noqa: RUF001
    assert f"{told}, no threshold gains anything." in lost


def test_where_only_finishing_gains_that_is_what_is_told(moving: Plan) -> None:
    found = changed(moving, threshold_s=None, speedup=1.0, finishing=FREE)

    assert headline(found) == (
        "DropCompute would get 30 % more done per second, with a threshold of 4 s and "
        "20 % dropped"
    )
    assert "Bounded, a step takes 4 s on average instead of 6 s" in text(found)
    assert "is finished (preempt=" in text(found)
    assert 'to leave it (preempt="backward") gains nothing.' in text(found)
    assert advice(found).startswith("Write: ")


def test_a_moving_straggler_is_told_with_the_one_that_is_it_most_often(
    moving: Plan,
) -> None:
    found = changed(moving, num_workers=8, slowest_share_W={"a": 0.3, "b": 0.7})

    assert "The straggler moves: worker a is the slowest most often, in 50 % of" in (
        text(moving)
    )
    assert (
        "The straggler is mostly worker b, in 70 % of the steps, though not by enough "
        "to be called slow all the time; of what is dropped 50 % is its work."
    ) in text(found)
    nothing = changed(found, dropped_share_W={"a": 0.0, "b": 0.0})
    assert "slow all the time. " in text(nothing)


def test_equal_workers_are_no_straggler(moving: Plan) -> None:
    assert "No worker is slower than the others." in text(
        changed(moving, straggler="none")
    )


def test_a_persistent_straggler_is_to_be_mended_first(moving: Plan) -> None:
    found = changed(
        moving,
        straggler="persists",
        persistent_stragglers=["b"],
        without_stragglers=FREE,
        max_drop=0.3,
    )

    assert headline(found) == (
        "Worker b is slow all the time: rebalance or replace first; within 30 % drop a "
        "bound gains 25 %"
    )
    assert (
        "The straggler persists: worker b is slow in step after step. A threshold "
        "drops up to 16.7 % of that worker's work; it hides the cause and does not "
        "mend it. Without, a step would take 6 s instead of 6 s, and a threshold gain "
        "30 % on top."
    ) in text(found)
    assert advice(found).startswith("Look at worker b first")


def test_several_stragglers_are_listed_and_many_are_counted(moving: Plan) -> None:
    two = changed(
        moving,
        straggler="persists",
        persistent_stragglers=["A", "b"],
        dropped_share_W={"A": 0.0, "b": 0.0},
        threshold_s=None,
        finishing=NOTHING,
        without_stragglers=NOTHING,
    )
    many = changed(two, persistent_stragglers=[f"w{number}" for number in range(10)])

    assert headline(two) == (
        "Workers A and b are slow all the time: rebalance or replace first"
    )
    assert "A threshold drops" not in text(two)
    assert "and a threshold gain nothing on top" in text(two)
    lost = changed(two, dropped_share_W={"A": 0.25, "b": 0.5}, without_stragglers=None)
    assert "A threshold drops up to 50 % of each one's work" in text(lost)
    assert "Without, " not in text(lost)
    many = changed(many, dropped_share_W=dict.fromkeys(many.persistent_stragglers, 0.0))
    assert "Workers w0, w1, w2, w3, w4, w5, w6, w7 and 2 more are" in headline(many)


def test_a_limit_that_binds_says_what_it_costs(moving: Plan) -> None:
    found = changed(moving, unlimited=FREE, max_drop=0.05)

    assert (
        "The limit of 5 % binds: without it the best threshold is 4 s, drops 20 % and "
        "gives 1.30×."  # noqa: RUF001
    ) in text(found)
    assert "binds" not in text(changed(found, max_drop=0.2))


def test_more_than_the_papers_found_harmless_is_told(moving: Plan) -> None:
    warning = "More than 10 % dropped is beyond what the papers found harmless"

    assert warning in text(moving)
    assert warning not in text(changed(moving, dropped_share=0.1))


def test_estimates_are_told_with_what_they_assume(moving: Plan) -> None:
    trace = Trace(np.ones((2, 2, 2)), None, ("a", "b"), (0, 1))
    found = plan(trace, num_workers=[2, 4], num_micro_batches=[2, 6])

    assert (
        "Estimated from the trace: 1.00× with 6 micro-batches, 1.00× with 4 workers, "  # noqa: RUF001
        "1.00× with 4 workers and 6 micro-batches (what is added is drawn from the "  # noqa: RUF001
        "trace as if independent of the rest of its step)."
    ) in text(found)
    assert "Estimated" not in text(moving)


def test_what_is_doubtful_is_told(moving: Plan) -> None:
    doubtful = text(
        changed(
            moving,
            is_comm_known=False,
            slow_first_steps=3,
            left_out_steps=2,
            imputed_share=0.05,
        )
    )

    assert "The communication time is not known and counts as 0" in doubtful
    assert "leave them out with --skip 3." in doubtful
    assert "The trace has few steps (2); 20 or more show" in doubtful
    assert "Steps left out because they are not whole: 2." in doubtful
    assert "A threshold cut 5 % of the micro-batches" in doubtful
    assert text(changed(moving, num_steps=20)).endswith("harmless for the result.")


def test_numbers_are_short() -> None:
    assert [percent(share) for share in (0.1091, 0.1, 0.0996, 0.0)] == [
        "10.9 %",
        "10 %",
        "10 %",
        "0 %",
    ]
    assert [seconds(time_s) for time_s in (5.72483, 0.0842, 1234.56)] == [
        "5.725 s",
        "84.2 ms",
        "1235 s",
    ]

"""The job under a compute bound: normalisation, choosing, records, compensation."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tailbound
from tailbound.config import ComputeBound, LossBound
from tailbound.errors import ConfigError
from tailbound.records import Record, StepReport, ThresholdReport
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.exchange import LocalExchange
from tailbound.training.job import Job
from training.fakes import HandClock
from training.ranks import Vector, plain_sgd, run_ranks

pytestmark = pytest.mark.sockets


def attach_slow(
    rank: int, make_exchange: MakeExchange, bound: ComputeBound, num: int, **told: Any
) -> tuple[Job, Vector, HandClock]:
    """A job on a hand clock."""
    hand = HandClock()
    model = Vector()
    job = attach_through(
        make_exchange,
        model,
        plain_sgd(model),
        micro_batches=num,
        compute=bound,
        clock=hand.clock(),
        **told,
    )
    return job, model, hand


def one_cut_step(
    rank: int, make_exchange: MakeExchange, bound: ComputeBound
) -> list[float]:
    """Rank 0 computes 4 of 4 with x = 1, rank 1 two of 4 with x = 4; -w per step."""
    job, model, hand = attach_slow(rank, make_exchange, bound, 4)
    gradients = []
    with job:
        for _ in range(2):
            before = model.w.item()
            for x in job.micro_batches(torch.full((4, 1), [1.0, 4.0][rank])):
                job.backward(model(x))
                hand.pass_s([0.1, 0.5][rank])
            job.step()
            gradients.append(before - model.w.item())
    return gradients


@pytest.mark.parametrize(
    ("normalize", "gradients"),
    [
        # (4 x 1 + 2 x 4) / 6, each time.
        ("computed", [2.0, 2.0]),
        # The same sum / 8.
        ("planned", [1.5, 1.5]),
        # The mean times 1 - the dropped share so far: none yet, then 2 of 8.
        ("constant", [2.0, 1.5]),
    ],
)
def test_the_sum_is_normalised_as_the_bound_says(
    normalize: Any, gradients: list[float]
) -> None:
    bound = ComputeBound(threshold_s=1.0, normalize=normalize)

    for outcome in run_ranks(partial(one_cut_step, bound=bound)):
        assert outcome == pytest.approx(gradients)


AUTO = ComputeBound(warmup_steps=1, calibration_steps=4, retune_every=5, max_drop=0.2)


def straggle(
    rank: int,
    make_exchange: MakeExchange,
    *,
    bound: ComputeBound = AUTO,
    steps: int = 11,
    look: Callable[[Job, int], None] = lambda job, step: None,
) -> list[Record]:
    """The ranks take turns to need 0.1, 1.5, 0.1, 1.5 and 0.1 s, else 0.1 s each."""
    records: list[Record] = []
    job, model, hand = attach_slow(
        rank, make_exchange, bound, 5, on_record=records.append
    )
    with job:
        for step in range(steps):
            for number, x in enumerate(job.micro_batches(iter(torch.ones(99, 1)))):
                job.backward(model(x))
                is_slow = number in (1, 3) and step % 2 == rank
                hand.pass_s(1.5 if is_slow else 0.1)
            job.step()
            look(job, step)
        job.review()
    return records


def test_auto_measures_then_bounds_and_every_rank_decides_alike() -> None:
    outcomes = run_ranks(straggle)

    thresholds = [
        [record for record in records if isinstance(record, ThresholdReport)]
        for records in outcomes
    ]
    # After warm-up and calibration, five bounded steps later, and by the review.
    assert [report.step for report in thresholds[0]] == [5, 10, 11]
    first = thresholds[0][0]
    # The slow rank may start a third micro-batch, at 1.6 s, and no fourth, at 1.7 s.
    assert first.threshold_s is not None
    assert first.threshold_s == pytest.approx(1.65)
    assert first.predicted_drop == pytest.approx(0.2)
    assert first.realised_step_s is None
    assert thresholds[0][1].realised_step_s is not None
    assert thresholds[0][1].calibration_step_s == first.calibration_step_s
    assert len(first.dropped_share_W) == 2
    assert first.persistent_stragglers == ()
    for ours, theirs in zip(*thresholds, strict=True):
        assert ours.threshold_s == theirs.threshold_s
        assert ours.verdict == theirs.verdict
        assert ours.relative_score_W == theirs.relative_score_W


def test_a_step_s_record_says_what_was_planned_computed_and_cut() -> None:
    (records, _) = run_ranks(
        partial(straggle, bound=ComputeBound(threshold_s=1.0), steps=2)
    )

    first, second = (r for r in records if isinstance(r, StepReport))
    # Rank 0 is slow in step 0, rank 1 in step 1.
    assert (first.planned, first.computed, first.threshold_s) == (5, 2.0, 1.0)
    assert first.overshoot_s == pytest.approx(0.6)
    assert first.latency_s == pytest.approx((0.1, 1.5))
    assert (first.total_planned, first.total_computed) == (10, 7.0)
    assert (second.computed, second.overshoot_s) == (5.0, None)
    assert second.total_computed == 7.0


def test_a_fixed_threshold_is_reported_on_too() -> None:
    bound = ComputeBound(threshold_s=1.0, retune_every=4)
    (records, _) = run_ranks(partial(straggle, bound=bound, steps=4))

    (report,) = (r for r in records if isinstance(r, ThresholdReport))
    assert (report.step, report.threshold_s) == (4, 1.0)
    assert report.dropped_share_W == pytest.approx((0.3, 0.3))
    assert report.predicted_drop is not None
    assert report.calibration_step_s is None


def test_growing_the_plan_makes_up_for_what_is_dropped() -> None:
    planned: list[int] = []
    bound = ComputeBound(
        warmup_steps=0, calibration_steps=4, max_drop=0.2, compensate="batch"
    )

    def look(job: Job, step: int) -> None:
        if job.rank == 0:
            planned.append(job.planned_micro_batches)

    run_ranks(partial(straggle, bound=bound, steps=6, look=look))

    # Two of ten are dropped: 5 / 0.8, rounded up.
    assert planned == [5, 5, 5, 7, 7, 7]


def test_extra_steps_follow_from_what_was_really_dropped() -> None:
    extra: list[int] = []

    def look(job: Job, step: int) -> None:
        extra.append(job.extra_steps(90))

    run_ranks(
        partial(straggle, bound=ComputeBound(threshold_s=1.0), steps=1, look=look)
    )

    assert extra == [39, 39]  # three of ten were dropped: 90 x 3 / 7


def resample(
    rank: int, make_exchange: MakeExchange, *, compensate: Any
) -> tuple[list[int], tuple[int, ...]]:
    """One epoch of 16 samples in batches of 4; each step drops its last micro-batch."""
    bound = ComputeBound(threshold_s=0.25, compensate=compensate)
    job, model, hand = attach_slow(rank, make_exchange, bound, 4)
    sampler = tailbound.ResamplingSampler(
        16, num_replicas=job.world_size, rank=rank, shuffle=False
    )
    data = TensorDataset(torch.arange(16.0).view(16, 1))
    used: list[int] = []
    with job:
        for (batch,) in job.epoch(DataLoader(data, 4, sampler=sampler)):
            for x in job.micro_batches(batch):
                job.backward(model(x))
                used.append(int(x))
                hand.pass_s(0.1)
            job.step()
    return used, sampler.unused


def test_a15_dropped_samples_come_back_before_the_epoch_ends() -> None:
    outcomes = run_ranks(partial(resample, compensate="resample"))

    used = sorted(index for indices, _ in outcomes for index in indices)
    assert sorted(set(used)) == list(range(16))
    assert [unused for _, unused in outcomes] == [(), ()]


def test_a15_else_they_are_listed() -> None:
    outcomes = run_ranks(partial(resample, compensate=None))

    # Rank r has 2 k + r; of each four the last is dropped.
    assert [unused for _, unused in outcomes] == [(6, 14), (7, 15)]


def test_a15_samples_of_a_step_that_was_given_up_are_unused() -> None:
    """An error left half a gradient, so the whole step counts for nothing."""

    def work(rank: int, make_exchange: MakeExchange) -> tuple[int, ...]:
        job, model, _ = attach_slow(rank, make_exchange, ComputeBound(), 4)
        sampler = tailbound.ResamplingSampler(4, num_replicas=1, rank=0, shuffle=False)
        data = TensorDataset(torch.ones(4, 1))
        broken = torch.full((1,), 2.0, requires_grad=True)
        broken.register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]
        with job:
            for (batch,) in job.epoch(DataLoader(data, 4, sampler=sampler)):
                for number, x in enumerate(job.micro_batches(batch)):
                    loss = model(x) if number != 2 else (model(x) * broken).sum()
                    with contextlib.suppress(ZeroDivisionError):
                        job.backward(loss)
                job.step()
        return sampler.unused

    assert run_ranks(work, num=1) == [(0, 1, 2, 3)]


def test_an_epoch_needs_a_sampler_that_listens() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> None:
        job, _, _ = attach_slow(rank, make_exchange, ComputeBound(), 4)
        with job:
            job.epoch(DataLoader(TensorDataset(torch.ones(4))))

    (outcome,) = run_ranks(work, num=1)

    assert isinstance(outcome, ConfigError)
    assert "sampler=tailbound.ResamplingSampler" in str(outcome)


def test_one_micro_batch_leaves_nothing_to_bound() -> None:
    model = Vector()

    with pytest.raises(ConfigError, match="set micro_batches to 2 or more"):
        tailbound.attach(model, plain_sgd(model), compute=ComputeBound())


def test_a_job_of_one_rank_is_bounded_too() -> None:
    (records,) = run_ranks(straggle, num=1)

    assert any(isinstance(record, ThresholdReport) for record in records)


def test_a_review_without_a_bound_or_without_news_is_none() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Any]:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            free = job.review()
        bounded, _, _ = attach_slow(rank, make_exchange, ComputeBound(), 4)
        return [free, bounded.review(), bounded.threshold_s]

    assert work_alone(work) == [None, None, None]


def work_alone(work: Callable[[int, MakeExchange], list[Any]]) -> list[Any]:
    return work(0, lambda specs: LocalExchange())


def test_both_bounds_hold_together_over_a_lossy_network() -> None:
    digests: list[str] = []

    def look(job: Job, step: int) -> None:
        digests.append(job.check_replicas())  # raises where they differ

    run_ranks(
        partial(straggle, steps=8, look=look),
        bound=LossBound(p_low=0.0, p_high=0.4, frequency=1),
    )

    assert len(digests) == 16

"""What came out of a run, in words."""

from report.synthetic import make_settings, one_check, one_epoch, one_round
from tailbound.records import Record
from tailbound.report.summary import Summary, summarise
from tailbound.report.verdict import headline, warnings


def burst(run: str, step: int, ms: float, waiting_ms: float, trips: int) -> Record:
    return one_round(
        run, step, latency_s=ms / 1e3, waiting_s=waiting_ms / 1e3, probes=trips
    )


def make_summary(
    *records: Record, bursts: tuple[int, ...] = (2,), epochs: int = 1
) -> Summary:
    settings = make_settings(workers=1, epochs=epochs, burst_rounds=list(bursts))
    return summarise(records, settings)


def test_one_burst_is_told_with_its_round_trips_and_its_bytes() -> None:
    summary = make_summary(
        burst("fixed", 2, 21.34, 17.93, 14),
        burst("adaptive", 2, 5.08, 4.02, 3),
        one_epoch("fixed", 1, metric=0.95, train_s=15.1),
        one_epoch("adaptive", 1, metric=0.9405, train_s=12.3),
    )

    assert summary.verdict == (
        "A burst round took 21.3 ms with the fixed bound and 5.08 ms with the "
        "phase-aware one (4.2 times faster). Of the fixed run's 21.3 ms, 17.9 ms "
        "(84 %) were 14 round trips and 3.4 ms were bytes; of the phase-aware run's "
        "5.08 ms, 4.02 ms (79 %) were 3 round trips and 1.06 ms were bytes. "
        "Over all rounds, the mean latency was 21.3 ms against 5.08 ms, and the 99th "
        "percentile 21.3 ms against 5.08 ms. "
        "Training took 15.1 s with the fixed bound and 12.3 s with the phase-aware "
        "one (18.5 % less). "
        "The accuracy ended at 0.9500 with the fixed bound and at 0.9405 with the "
        "phase-aware one (99.0 % of the fixed run's). "
        "In both runs the parameters were bit-identical on all ranks at every epoch."
    )
    assert headline(summary) == (
        "Burst rounds were 4.2 times faster with the phase-aware loss bound"
    )


def test_several_bursts_are_averaged_over_those_that_both_runs_reached() -> None:
    summary = make_summary(
        burst("fixed", 2, 20.0, 16.0, 14),
        burst("fixed", 4, 10.0, 8.0, 11),
        burst("fixed", 6, 90.0, 80.0, 60),
        burst("adaptive", 2, 4.0, 1.0, 1),
        burst("adaptive", 4, 6.0, 2.0, 1),
        bursts=(2, 4, 6),
    )

    assert summary.verdict.startswith(
        "A burst round took 15.0 ms on average with the fixed bound and 5.00 ms with "
        "the phase-aware one (3.0 times faster). Of the fixed run's 15.0 ms, 12.0 ms "
        "(80 %) were 12.5 round trips and 3.0 ms were bytes; of the phase-aware run's "
        "5.00 ms, 1.50 ms (30 %) was 1 round trip and 3.50 ms were bytes."
    )


def test_a_run_alone_tells_its_own_bursts() -> None:
    summary = make_summary(burst("fixed", 2, 20.0, 16.0, 14), epochs=3)

    assert summary.verdict == (
        "A burst round took 20.0 ms in the fixed run. Of the fixed run's 20.0 ms, "
        "16.0 ms (80 %) were 14 round trips and 4.0 ms were bytes. "
        "The fixed run ended early, at step 2, with 0 of 3 epochs done. "
        "The phase-aware run left no records."
    )
    assert headline(summary) == "Only the fixed run left records"


def test_a_slower_and_an_equal_run_are_called_so() -> None:
    slower = make_summary(
        burst("fixed", 2, 4.0, 3.0, 3), burst("adaptive", 2, 6.0, 5.0, 5)
    )
    equal = make_summary(
        burst("fixed", 2, 4.0, 3.0, 3), burst("adaptive", 2, 4.1, 3.0, 3)
    )

    assert headline(slower) == (
        "Burst rounds were 1.5 times slower with the phase-aware loss bound"
    )
    assert headline(equal) == "Burst rounds were about as fast with either loss bound"


def test_without_bursts_the_mean_is_the_headline() -> None:
    summary = make_summary(
        one_round("fixed", 1, latency_s=0.003),
        one_round("adaptive", 1, latency_s=0.002),
        bursts=(),
    )

    assert headline(summary) == (
        "Rounds were 1.5 times faster with the phase-aware loss bound"
    )


def test_perplexity_is_compared_the_other_way() -> None:
    def ended(adaptive: float) -> str:
        fixed = one_epoch("fixed", 1, metric=10.0, metric_name="perplexity")
        other = one_epoch("adaptive", 1, metric=adaptive, metric_name="perplexity")
        return make_summary(fixed, other).verdict

    assert (
        "12.50 with the phase-aware one (25.0 % worse than the fixed run's; lower "
        in (ended(12.5))
    )
    assert "(20.0 % better than the fixed run's; lower is better)" in ended(8.0)
    assert "(as good as the fixed run's; lower is better)" in ended(10.0)


def test_training_that_took_longer_or_as_long_is_called_so() -> None:
    def trained(adaptive_s: float) -> str:
        return make_summary(
            one_epoch("fixed", 1, train_s=10.0),
            one_epoch("adaptive", 1, train_s=adaptive_s),
        ).verdict

    assert "12.0 s with the phase-aware one (20.0 % more)." in trained(12.0)
    assert "10.1 s with the phase-aware one (about as long)." in trained(10.05)


def test_what_a_deadline_gave_up_is_a_warning() -> None:
    """Of 20 chunks of the fixed run 3 were given up; of 30 of the other's 1 and 2."""
    summary = make_summary(
        one_round("fixed", 1, missing=3, given_up=3),
        one_round("fixed", 2),
        one_round("adaptive", 1, missing=5, given_up=1),
        one_round("adaptive", 2, missing=5, given_up=2),
        one_round("adaptive", 3, missing=4),
        one_epoch("fixed", 1),
        one_epoch("adaptive", 1),
        bursts=(),
    )

    assert warnings(summary) == [
        "A deadline cut 1 gradient of the fixed run: 15.0 % of all chunks were given "
        "up beyond the loss bound.",
        "A deadline cut 2 gradients of the phase-aware run: 10.0 % of all chunks were "
        "given up beyond the loss bound.",
    ]


def test_steps_whose_gradient_was_not_finite_are_a_warning() -> None:
    """Two ranks tell of step 1; steps 1 and 3 are two."""
    summary = make_summary(
        one_check("fixed", 1, 0, non_finite=True),
        one_check("fixed", 1, 1, non_finite=True),
        one_check("fixed", 2),
        one_check("fixed", 3, non_finite=True),
        one_epoch("fixed", 1),
        one_check("adaptive", 1),
        one_epoch("adaptive", 1),
        bursts=(),
    )

    assert warnings(summary) == [
        "In 2 steps of the fixed run the gradient had inf or NaN."
    ]


def test_replicas_that_differ_are_a_warning() -> None:
    summary = make_summary(
        one_epoch("fixed", 1, 0, digest="x"),
        one_epoch("fixed", 1, 1, digest="y"),
        one_epoch("adaptive", 1),
    )

    assert warnings(summary) == [
        "The parameters of the fixed run differed between ranks: its metric is not "
        "that of one model."
    ]
    assert (
        "In the phase-aware run the parameters were bit-identical on all ranks at "
        "every epoch." in summary.verdict
    )


def test_no_records_are_told_as_such() -> None:
    summary = make_summary()

    assert summary.verdict == "There are no records of a run named fixed or adaptive."
    assert headline(summary) == "The runs left too little to compare"
    assert warnings(summary) == []


def test_a_burst_round_without_time_is_not_divided_by() -> None:
    summary = make_summary(
        burst("fixed", 2, 0.0, 0.0, 0), burst("adaptive", 2, 0.0, 0.0, 0)
    )

    assert summary.ratio.burst == [None]
    assert summary.ratio.mean is None
    assert "0.00 ms (0 %) were 0 round trips and 0.00 ms were bytes" in summary.verdict
    assert headline(summary) == "The runs left too little to compare"


def test_a_ratio_of_zero_is_not_put_into_words() -> None:
    summary = make_summary(
        one_round("fixed", 1, latency_s=0.0),
        one_round("adaptive", 1),
        one_epoch("fixed", 1, metric=0.0, metric_name="perplexity", train_s=0.0),
        one_epoch("adaptive", 1, metric=2.0, metric_name="perplexity"),
    )

    assert (summary.ratio.mean, summary.ratio.metric_kept) == (0.0, 0.0)
    assert headline(summary) == "The runs left too little to compare"
    assert "perplexity" not in summary.verdict
    assert "Training took" not in summary.verdict

"""What follows from the rounds of a benchmark."""

import msgspec
import pytest

from report import benches
from tailbound.report.bench_outcome import (
    BenchRatio,
    BenchSummary,
    BoundSummary,
    Checked,
    SideSummary,
    summarise_bench,
)


def test_percentiles_are_interpolated_and_costs_are_means() -> None:
    summary = benches.summary()

    assert summary.tailbound == SideSummary(
        p50_ms=110.5,
        p95_ms=119.05,
        p99_ms=119.81,
        max_ms=120.0,
        mean_ms=110.5,
        burst_ms=115.0,
        cpu_ms=60.0,
        user_ms=30.0,
        system_ms=30.0,
        wire_mb=80.0,
    )
    assert summary.gloo is not None
    assert (summary.gloo.p50_ms, summary.gloo.max_ms) == (442.0, 480.0)
    assert (summary.gloo.cpu_ms, summary.gloo.burst_ms) == (40.0, 460.0)


def test_ratios_are_tailbound_over_gloo() -> None:
    assert benches.summary().ratio == BenchRatio(
        p50=0.25, p95=0.25, p99=0.25, max=0.25, cpu=1.5, wire=0.8
    )


def test_rounds_are_told_apart_by_their_bound() -> None:
    assert benches.summary().bounds == [
        BoundSummary(p=0.008, rounds=10, p50_ms=105.5, p95_ms=109.55, missing_share=0),
        BoundSummary(
            p=0.408, rounds=10, p50_ms=115.5, p95_ms=119.55, missing_share=0.25
        ),
    ]


def test_alone_there_is_no_ratio() -> None:
    summary = benches.summary(is_alone=True)

    assert (summary.gloo, summary.ratio) == (None, None)


def test_without_bursts_there_is_no_burst_time() -> None:
    summary = summarise_bench(
        benches.settings(), benches.rounds(9), Checked(exact=1, identical=0)
    )

    assert summary.tailbound.burst_ms is None


@pytest.mark.parametrize("is_alone", [False, True])
def test_it_comes_back_whole_from_its_json(is_alone: bool) -> None:
    summary = benches.summary(is_alone=is_alone)

    text = summary.to_json()

    assert msgspec.json.decode(text, type=BenchSummary) == summary
    assert text.endswith("}\n")

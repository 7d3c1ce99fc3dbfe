"""Both runs in numbers, computed by hand on a few records."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from report.synthetic import make_settings, one_check, one_epoch, one_round
from tailbound.errors import ConfigError
from tailbound.records import Record
from tailbound.report.summary import (
    BurstSplit,
    Ratio,
    RunSummary,
    read_settings,
    summarise,
)

SETTINGS = make_settings(workers=2, epochs=1, burst_rounds=[2])


def two_runs() -> list[Record]:
    """Two workers, two steps, the second of them a burst round."""
    return [
        one_round("fixed", 1, latency_s=0.002, probes=2, sent=12, retransmitted=2),
        one_round("fixed", 1, rank=1, latency_s=0.002, critical=True),
        one_round(
            "fixed", 2, latency_s=0.020, waiting_s=0.015, probes=14, sent=33,
            retransmitted=23, missing=1,
        ),
        one_round("fixed", 2, rank=1, latency_s=0.016, waiting_s=0.01, probes=11),
        one_round("fixed", 2, rank=1, latency_s=9.0, direction="back", sent=999),
        one_epoch("fixed", 1, 0, metric=0.8, train_s=12.0),
        one_epoch("fixed", 1, 1, metric=0.8, train_s=12.5),
        one_round("adaptive", 1, latency_s=0.001),
        one_round("adaptive", 1, rank=1, latency_s=0.001),
        one_round("adaptive", 2, latency_s=0.004, waiting_s=0.003, probes=3, missing=4),
        one_round("adaptive", 2, rank=1, latency_s=0.005, waiting_s=0.003, probes=3),
        one_epoch("adaptive", 1, 0, metric=0.76, train_s=10.0),
        one_epoch("adaptive", 1, 1, metric=0.76, train_s=10.0),
    ]  # fmt: skip


def test_a_run_is_summed_up_over_its_way_in() -> None:
    """Latencies 2, 2, 16, 20 ms: median 9, p99 16 + 0.97 * 4, mean 10."""
    summary = summarise(iter(two_runs()), SETTINGS)

    assert summary.fixed == RunSummary(
        burst_ms=[20.0],
        p99_ms=19.88,
        mean_ms=10.0,
        p50_ms=9.0,
        train_s=12.5,
        metric=0.8,
        metric_name="accuracy",
        retransmitted_share=0.384615,  # 25 of 65
        lost_share=0.025,  # 1 of 40
        beyond_share=0.0,
        probes_per_round=7.0,  # 2 + 1 + 14 + 11 in 4 rounds
        critical_share=0.25,
        steps=25,
        epochs=1,
        identical=True,
    )


def test_ratios_are_fixed_over_adaptive() -> None:
    """Adaptive: 1, 1, 4, 5 ms, so mean 2.75 and p99 4 + 0.97 * 1."""
    assert summarise(two_runs(), SETTINGS).ratio == Ratio(
        burst=[4.0], p99=4.0, mean=3.63636, train=1.25, metric_kept=0.95
    )


def test_a_burst_round_is_split_into_round_trips_and_bytes() -> None:
    assert summarise(two_runs(), SETTINGS).burst_split == {
        "fixed": [
            BurstSplit(
                round=2,
                rank=0,
                round_trips=14,
                latency_ms=20.0,
                round_trips_ms=15.0,
                bytes_ms=5.0,
            )
        ],
        "adaptive": [
            BurstSplit(
                round=2,
                rank=1,
                round_trips=3,
                latency_ms=5.0,
                round_trips_ms=3.0,
                bytes_ms=2.0,
            )
        ],
    }


def test_lower_perplexity_is_better() -> None:
    records: list[Record] = [
        one_epoch("fixed", 1, metric=10.0, metric_name="perplexity"),
        one_epoch("adaptive", 1, metric=12.5, metric_name="perplexity"),
    ]

    assert summarise(records, SETTINGS).ratio.metric_kept == 0.8


def test_the_last_epoch_counts() -> None:
    records: list[Record] = [
        one_epoch("fixed", 2, metric=0.5, train_s=4.0),
        one_epoch("fixed", 1, metric=0.9, train_s=2.0),
    ]

    fixed = summarise(records, SETTINGS).fixed

    assert fixed is not None
    assert (fixed.metric, fixed.train_s, fixed.epochs) == (0.5, 4.0, 2)


def test_a_run_cut_before_its_first_epoch_has_none_where_nothing_is_known() -> None:
    summary = summarise([one_round("fixed", 1, sent=0)], SETTINGS)

    assert summary.adaptive is None
    assert summary.fixed == RunSummary(
        burst_ms=[None],
        p99_ms=1.0,
        mean_ms=1.0,
        p50_ms=1.0,
        train_s=None,
        metric=None,
        metric_name=None,
        retransmitted_share=None,
        lost_share=0.0,
        beyond_share=0.0,
        probes_per_round=1.0,
        critical_share=0.0,
        steps=1,
        epochs=0,
        identical=None,
    )
    assert summary.ratio == Ratio(
        burst=[None], p99=None, mean=None, train=None, metric_kept=None
    )
    assert summary.burst_split == {"fixed": [None], "adaptive": [None]}


def test_a_run_with_steps_only_has_no_latency() -> None:
    fixed = summarise([one_check("fixed", 7)], SETTINGS).fixed

    assert fixed is not None
    assert (fixed.steps, fixed.p99_ms, fixed.probes_per_round) == (7, None, None)


def test_no_records_at_all_still_give_a_summary() -> None:
    summary = summarise([], SETTINGS)

    assert (summary.fixed, summary.adaptive) == (None, None)


def test_a_run_of_another_name_is_left_out() -> None:
    summary = summarise([one_round("mine", 1)], SETTINGS)

    assert (summary.fixed, summary.adaptive) == (None, None)


@pytest.mark.parametrize(
    ("digests", "identical"),
    [
        ([["x", "x"], ["y", "y"]], True),
        ([["x", "x"], ["y", "z"]], False),
        ([["x", "y"], ["z", "z"]], False),
        ([["x", "x"], ["y"]], True),
        ([["x"]], None),
        ([], None),
    ],
)
def test_replicas_are_identical_if_every_epoch_has_one_digest(
    digests: list[list[str]], identical: bool | None
) -> None:
    records: list[Record] = [one_round("fixed", 1)]
    records += [
        one_epoch("fixed", epoch, rank, digest=digest)
        for epoch, ranks in enumerate(digests, 1)
        for rank, digest in enumerate(ranks)
    ]

    fixed = summarise(records, SETTINGS).fixed

    assert fixed is not None
    assert fixed.identical is identical


def test_json_is_one_object_with_the_promised_keys() -> None:
    parsed = json.loads(summarise(two_runs(), SETTINGS).to_json())

    assert list(parsed) == [
        "fixed", "adaptive", "ratio", "burst_split", "verdict", "settings",
    ]  # fmt: skip
    assert parsed["fixed"]["burst_ms"] == [20.0]
    assert parsed["ratio"]["burst"] == [4.0]
    assert parsed["settings"]["burst_rounds"] == [2]


def test_a_metric_that_is_not_finite_is_null_in_json_and_has_no_ratio() -> None:
    records: list[Record] = [
        one_epoch("fixed", 1, metric=math.nan, metric_name="perplexity"),
        one_epoch("adaptive", 1, metric=3.0, metric_name="perplexity"),
    ]

    summary = summarise(records, SETTINGS)

    assert json.loads(summary.to_json())["fixed"]["metric"] is None
    assert summary.ratio.metric_kept is None


def test_settings_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode(SETTINGS))

    assert read_settings(path) == SETTINGS


def test_settings_that_lack_a_field_are_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"task": "digits"}')

    with pytest.raises(ConfigError) as caught:
        read_settings(path)

    assert str(caught.value) == (
        f"{path}: not the settings of a run: Object missing required field `workers`"
    )


def test_settings_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"

    with pytest.raises(ConfigError) as caught:
        read_settings(path)

    assert str(caught.value) == f"cannot read {path}: No such file or directory"

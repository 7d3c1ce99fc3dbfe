"""Make a summary of a run's records: what each bound cost and gained.

Reads records and settings, needs no plotting library. ``outcome`` says what the
numbers mean.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from tailbound.errors import ConfigError
from tailbound.records import EpochReport, Record, RoundReport
from tailbound.report.outcome import (
    BurstSplit,
    Ratio,
    RunSettings,
    RunSummary,
    Summary,
)
from tailbound.report.series import RunRecords, gather, latencies_ms, mean
from tailbound.report.text import six_digits
from tailbound.report.verdict import make_verdict

__all__ = [
    "BurstSplit",
    "Ratio",
    "RunSettings",
    "RunSummary",
    "Summary",
    "read_settings",
    "summarise",
]

RUNS = ("fixed", "adaptive")


def summarise(records: Iterable[Record], settings: RunSettings) -> Summary:
    """Compare the runs named ``fixed`` and ``adaptive``; other runs are left out.

    Args:
        records: a run folder's records, in any order; read once.
        settings: how the runs were made.

    Returns:
        The summary. A run without records is None, and so is all that needs it.

    Source: spec N11; the ratios are those of DBLP, tables II to VI.
    """
    runs = gather(records)
    splits = {
        name: split_bursts(runs.get(name, RunRecords()).way_in, settings.burst_rounds)
        for name in RUNS
    }
    fixed, adaptive = (
        summarise_run(runs.get(name), splits[name], settings) for name in RUNS
    )
    summary = Summary(
        fixed=fixed,
        adaptive=adaptive,
        ratio=compare(fixed, adaptive, len(settings.burst_rounds)),
        burst_split=splits,
        verdict="",
        settings=settings,
    )
    return msgspec.structs.replace(summary, verdict=make_verdict(summary))


def read_settings(path: Path) -> RunSettings:
    """Read ``settings.json``.

    Raises:
        ConfigError: the file cannot be read or does not hold settings.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSettings)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not the settings of a run: {error}") from error


def summarise_run(
    run: RunRecords | None, splits: list[BurstSplit | None], settings: RunSettings
) -> RunSummary | None:
    """Put one run into numbers; None for a run without records."""
    if run is None:
        return None
    way_in = run.way_in
    last_epoch = max((report.epoch for report in run.epochs), default=0)
    last = [report for report in run.epochs if report.epoch == last_epoch]
    latency_ms = latencies_ms(way_in)
    everything: list[Record] = [*way_in, *run.steps, *run.epochs]
    p50_ms, p99_ms, mean_ms = None, None, None
    if way_in:
        p50_ms, p99_ms = (float(q) for q in np.percentile(latency_ms, (50.0, 99.0)))
        mean_ms = float(np.mean(latency_ms))
    return RunSummary(
        burst_ms=[None if split is None else split.latency_ms for split in splits],
        p99_ms=rounded(p99_ms),
        mean_ms=rounded(mean_ms),
        p50_ms=rounded(p50_ms),
        train_s=rounded(max((report.train_s for report in last), default=None)),
        metric=rounded(mean([report.metric for report in last]) if last else None),
        metric_name=last[0].metric_name if last else None,
        retransmitted_share=share(
            sum(report.retransmitted for report in way_in),
            sum(report.sent for report in way_in),
        ),
        lost_share=share(
            sum(report.missing for report in way_in),
            sum(report.num_chunks for report in way_in),
        ),
        beyond_share=share(
            sum(report.given_up for report in way_in),
            sum(report.num_chunks for report in way_in),
        ),
        cut_rounds=sum(report.given_up > 0 for report in way_in),
        non_finite_steps=len({r.step for r in run.steps if r.non_finite}),
        probes_per_round=share(sum(report.probes for report in way_in), len(way_in)),
        critical_share=share(sum(report.critical for report in way_in), len(way_in)),
        steps=max((record.step for record in everything), default=0),
        epochs=last_epoch,
        identical=are_identical(run.epochs, settings.workers),
    )


def split_bursts(
    way_in: list[RoundReport], burst_rounds: list[int]
) -> list[BurstSplit | None]:
    """For each burst round, the slowest worker's time; None if it was not reached."""
    slowest: dict[int, RoundReport] = {}
    for report in way_in:
        known = slowest.get(report.counter)
        if known is None or report.latency_s > known.latency_s:
            slowest[report.counter] = report
    return [
        split_time(slowest[burst_round]) if burst_round in slowest else None
        for burst_round in burst_rounds
    ]


def split_time(report: RoundReport) -> BurstSplit:
    """How much of a round was round trips, and how much was bytes."""
    return BurstSplit(
        round=report.counter,
        rank=report.rank,
        round_trips=report.probes,
        latency_ms=six_digits(1e3 * report.latency_s),
        round_trips_ms=six_digits(1e3 * report.waiting_s),
        bytes_ms=six_digits(1e3 * (report.latency_s - report.waiting_s)),
    )


def compare(
    fixed: RunSummary | None, adaptive: RunSummary | None, num_bursts: int
) -> Ratio:
    """Divide fixed by adaptive; None where one of the two is not known."""
    if fixed is None or adaptive is None:
        return Ratio(
            burst=[None] * num_bursts, p99=None, mean=None, train=None, metric_kept=None
        )
    metrics = (adaptive.metric, fixed.metric)
    if fixed.lower_is_better:
        metrics = (fixed.metric, adaptive.metric)
    return Ratio(
        burst=[
            share(over, under)
            for over, under in zip(fixed.burst_ms, adaptive.burst_ms, strict=True)
        ],
        p99=share(fixed.p99_ms, adaptive.p99_ms),
        mean=share(fixed.mean_ms, adaptive.mean_ms),
        train=share(fixed.train_s, adaptive.train_s),
        metric_kept=share(*metrics),
    )


def are_identical(epochs: list[EpochReport], workers: int) -> bool | None:
    """Whether all ranks had equal parameters; None while no epoch is complete."""
    digests: dict[int, dict[int, str]] = {}
    for report in epochs:
        digests.setdefault(report.epoch, {})[report.rank] = report.digest
    if any(len(set(by_rank.values())) > 1 for by_rank in digests.values()):
        return False
    complete = any(len(by_rank) >= workers for by_rank in digests.values())
    return True if complete else None


def share(part: float | None, whole: float | None) -> float | None:
    """A quotient; None where a side is unknown, not finite, or the divisor is 0."""
    if part is None or whole is None or whole == 0.0:
        return None
    quotient = part / whole
    return six_digits(quotient) if math.isfinite(quotient) else None


def rounded(value: float | None) -> float | None:
    """Six significant digits, or None."""
    return None if value is None else six_digits(value)

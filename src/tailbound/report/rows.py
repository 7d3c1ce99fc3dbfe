"""The rows of the comparison table, as text; the terminal and the page print them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tailbound.report.outcome import RunSummary, Summary
from tailbound.report.text import UNKNOWN, metric, number, percent, times, with_unit

Format = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what it is, both runs' values, and fixed over adaptive."""

    label: str
    fixed: str
    adaptive: str
    ratio: str
    """Empty where a ratio says nothing."""
    is_main: bool
    """True for the measures that the bar is set on."""


def make_rows(summary: Summary) -> list[Row]:
    """The comparison, the most telling measure first.

    Args:
        summary: both runs; a run that is not there has dashes.
    """
    ms = partial(with_unit, unit="ms")
    seconds = partial(with_unit, unit="s")
    ratio = summary.ratio
    rows = [
        Row(
            f"burst round {burst_round}",
            ms(burst_of(summary.fixed, index)),
            ms(burst_of(summary.adaptive, index)),
            times(ratio.burst[index]),
            True,
        )
        for index, burst_round in enumerate(summary.settings.burst_rounds)
    ]

    def add(
        label: str, field: str, form: Format, over: str = "", is_main: bool = False
    ) -> None:
        fixed, adaptive = (
            form(None if run is None else getattr(run, field))
            for run in (summary.fixed, summary.adaptive)
        )
        rows.append(Row(label, fixed, adaptive, over, is_main))

    add("latency, 99th percentile", "p99_ms", ms, times(ratio.p99), True)
    add("latency, mean", "mean_ms", ms, times(ratio.mean), True)
    add("latency, median", "p50_ms", ms)
    add("training time", "train_s", seconds, times(ratio.train), True)
    kept = "" if ratio.metric_kept is None else f"{percent(ratio.metric_kept)} kept"
    add(metric_label(summary), "metric", metric, kept, True)
    add("probes per round", "probes_per_round", number)
    add("datagrams retransmitted", "retransmitted_share", percent)
    add("chunks given up", "lost_share", percent)
    if any(run and run.cut_rounds for run in (summary.fixed, summary.adaptive)):
        add("chunks beyond the bound", "beyond_share", percent)
    add("rounds in the critical regime", "critical_share", percent)
    add("steps", "steps", whole)
    add("replicas bit-identical", "identical", yes_or_no)
    return rows


def burst_of(run: RunSummary | None, index: int) -> float | None:
    """Latency of one burst round, if the run is there and reached it."""
    return None if run is None else run.burst_ms[index]


def metric_label(summary: Summary) -> str:
    """The metric's name, and which way is better."""
    named = [
        run for run in (summary.fixed, summary.adaptive) if run and run.metric_name
    ]
    if not named:
        return "metric"
    lower = " (lower is better)" if named[0].lower_is_better else ""
    return f"{named[0].metric_name}{lower}"


def whole(value: float | None) -> str:
    """A count."""
    return UNKNOWN if value is None else f"{value:.0f}"


def yes_or_no(value: float | None) -> str:
    """A truth value, which may be unknown."""
    return UNKNOWN if value is None else "yes" if value else "NO"

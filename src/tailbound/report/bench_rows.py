"""The benchmark in words and rows of text: for the page and for the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from tailbound.report.bench_outcome import BenchSummary
from tailbound.report.text import UNKNOWN, bound, number, percent, plural, times

HEADINGS = ("", "tailbound", "Gloo", "tailbound / Gloo")
BOUND_HEADINGS = ("loss bound", "rounds", "p50", "p95", "given up")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A measure of both libraries."""

    label: str
    cells: tuple[str, str, str]
    """tailbound's, Gloo's and their ratio."""
    is_main: bool = False


def bench_rows(summary: BenchSummary) -> list[BenchRow]:
    """The measures, the main ones marked."""

    def row(
        label: str, name: str, ratio: str = "", unit: str = "ms", main: bool = False
    ) -> BenchRow:
        cells = (
            _cell(getattr(summary.tailbound, name), unit),
            _cell(getattr(summary.gloo, name, None), unit),
            times(getattr(summary.ratio, ratio, None)),
        )
        return BenchRow(label, cells, main)

    rows = [
        row("half of the rounds within", "p50_ms", "p50", main=True),
        row("95 % within", "p95_ms", "p95", main=True),
        row("99 % within", "p99_ms", "p99"),
        row("slowest round", "max_ms", "max"),
        row("mean", "mean_ms"),
        row("CPU of a rank", "cpu_ms", "cpu", main=True),
        row("  in the program", "user_ms"),
        row("  in the kernel", "system_ms"),
        row("sent by all ranks", "wire_mb", "wire", unit="MB"),
    ]
    if summary.tailbound.burst_ms is not None:
        rows.insert(5, row("burst rounds, median", "burst_ms"))
    return rows


def bound_rows(summary: BenchSummary) -> list[tuple[str, ...]]:
    """The rounds of tailbound, apart by loss bound."""
    return [
        (
            bound(part.p),
            str(part.rounds),
            _cell(part.p50_ms, "ms"),
            _cell(part.p95_ms, "ms"),
            percent(part.missing_share),
        )
        for part in summary.bounds
    ]


def headline(summary: BenchSummary) -> str:
    """What came of it, in one line."""
    ratio = summary.ratio
    ours = f"95 % of the rounds within {number(summary.tailbound.p95_ms)} ms"
    if ratio is None:
        return ours
    theirs = number(summary.gloo.p95_ms if summary.gloo else None)
    return f"{ours}, Gloo's within {theirs} ms: {times(ratio.p95)}"


def describe_network(summary: BenchSummary) -> str:
    """Where the packets went, and what happened to them."""
    settings = summary.settings
    if not settings.hosts:
        return f"loopback, MTU {settings.mtu}"
    parts = [f"a host for each rank, MTU {settings.mtu}"]
    parts.append(f"{bound(settings.loss)} of the packets lost")
    if settings.burst:
        parts.append(
            f"{bound(settings.burst)} for {settings.burst_ms:g} ms in every "
            f"{settings.burst_every}th round"
        )
    return ", ".join(parts)


def sentences(summary: BenchSummary) -> Iterator[str]:
    """How far to trust it."""
    checked = summary.checked
    if checked.exact:
        yield (
            "Exact on every rank, bit for bit, wherever nothing was missing: "
            f"{plural(checked.exact, 'turn')}."
        )
    if checked.identical:
        yield (
            "The same bytes on every rank wherever chunks were given up: "
            f"{plural(checked.identical, 'turn')}."
        )
    settings = summary.settings
    if settings.rounds < 100:
        yield (
            f"With {plural(settings.rounds, 'round')} the 99th percentile is close to "
            "the slowest round."
        )
    yield (
        f"{plural(settings.world, 'rank')} shared {plural(settings.cores, 'core')}; "
        f"the load of this machine was {settings.load:g} before."
    )


def _cell(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{number(value)} {unit}"

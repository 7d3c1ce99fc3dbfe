"""The benchmark's plots: how round times are spread, and round by round.

Needs matplotlib, so it is imported only where a plot is made. As in ``plots``, each
comes for a wide page and for a phone. Lines differ in dashes and markers too, not only
in colour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from tailbound.report.bench_outcome import BenchSummary, SideSummary
from tailbound.report.drawing import log_axis, style
from tailbound.report.palette import LIGHT, THEMED, Palette
from tailbound.report.plots import Plot
from tailbound.report.series import Floats
from tailbound.report.svg import to_inline_svg
from tailbound.report.text import number


@dataclass(frozen=True, slots=True)
class BenchView:
    """What a drawing needs to know: what to draw, in which colours, how wide."""

    summary: BenchSummary
    palette: Palette
    is_narrow: bool = False

    @property
    def sides(self) -> "list[SideLine]":
        """The libraries that took turns, and how their lines look."""
        summary, palette = self.summary, self.palette
        ours_ms = np.array([one.tailbound.latency_ms for one in summary.rounds])
        lines = [
            SideLine(
                "tailbound", summary.tailbound, ours_ms, palette.adaptive, "-", "s"
            )
        ]
        theirs_ms = [one.gloo.latency_ms for one in summary.rounds if one.gloo]
        if summary.gloo is not None:
            gloo_ms = np.array(theirs_ms)
            lines.append(
                SideLine("Gloo", summary.gloo, gloo_ms, palette.fixed, "--", "o")
            )
        return lines


@dataclass(frozen=True, slots=True)
class SideLine:
    """One library's rounds, and how they are drawn."""

    name: str
    summary: SideSummary
    latency_ms_R: Floats
    color: str
    dashes: Literal["-", "--"]
    marker: str


def render_bench_plots(summary: BenchSummary) -> list[Plot]:
    """Draw both plots for a page."""
    plots = []
    for design in DESIGNS:
        wide, narrow = (
            draw_svg(design, BenchView(summary, THEMED, is_narrow))
            for is_narrow in (False, True)
        )
        plots.append(Plot(design.title, design.caption, wide, narrow))
    return plots


def write_cdf_png(path: Path, summary: BenchSummary) -> None:
    """Draw how round times are spread, 1500 pixels wide and legible at half of that.

    Args:
        path: where to write; what was there is replaced.
        summary: of a run.
    """
    with style(LIGHT, font_size=9.0):
        figure = Figure((7.5, 3.4), dpi=200, layout="constrained", facecolor=LIGHT.page)
        draw_cdf(figure.add_subplot(), BenchView(summary, LIGHT))
        figure.savefig(path, format="png", metadata={"Software": None})


def draw_svg(design: "Design", view: BenchView) -> str:
    """Draw one plot for one width."""
    width, height = (340, 290) if view.is_narrow else (760, 320)
    with style(view.palette, font_size=11.0 if view.is_narrow else 12.0):
        figure = Figure((width / 72, height / 72), dpi=72, layout="constrained")
        design.draw(figure.add_subplot(), view)
        prefix = f"{design.name}-{'narrow' if view.is_narrow else 'wide'}"
        return to_inline_svg(figure, prefix=prefix, label=design.title)


def draw_cdf(ax: Axes, view: BenchView) -> None:
    """Share of rounds that took at most so long, log x."""
    for line in view.sides:
        latency_ms_R = np.sort(line.latency_ms_R)
        share_R = np.arange(1, len(latency_ms_R) + 1) / len(latency_ms_R)
        ax.step(
            np.concatenate((latency_ms_R[:1], latency_ms_R)),
            np.concatenate(([0.0], share_R)),
            where="post",
            color=line.color,
            linestyle=line.dashes,
            linewidth=1.8,
        )
    log_axis(ax, "x", _all_ms(view), room=1.15)
    ax.set_xlabel("time of a round (ms)")
    ax.set_ylabel("share of rounds (%)")
    ax.set_ylim(0.0, 1.02)
    ax.yaxis.set_major_locator(FixedLocator([0.0, 0.25, 0.5, 0.75, 1.0]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    ax.axhline(0.95, color=view.palette.muted, linewidth=0.8, linestyle=":")
    notes = {
        line.name: f"{line.name}, p95 {number(line.summary.p95_ms)} ms"
        for line in view.sides
    }
    add_legend(ax, view, notes)


def draw_rounds(ax: Axes, view: BenchView) -> None:
    """Time of each round, in the order in which they ran, log y."""
    rounds = view.summary.rounds
    number_R = [one.number for one in rounds]
    for line in view.sides:
        ax.plot(
            number_R,
            line.latency_ms_R,
            color=line.color,
            linestyle=line.dashes,
            linewidth=1.2,
            marker=line.marker,
            markersize=4.0,
        )
    log_axis(ax, "y", _all_ms(view), room=1.3)
    ax.set_xlabel("round")
    ax.set_ylabel("time of a round (ms)")
    ax.xaxis.set_major_locator(
        MaxNLocator(5 if view.is_narrow else 10, integer=True, min_n_ticks=1)
    )
    bursts = [one.number for one in rounds if one.is_burst]
    for burst in bursts:
        ax.axvline(burst, color=view.palette.muted, linewidth=0.9, linestyle=":")
    add_legend(ax, view, {line.name: line.name for line in view.sides}, bool(bursts))


def add_legend(
    ax: Axes, view: BenchView, labels: dict[str, str], has_bursts: bool = False
) -> None:
    """Say above the plot which line is which."""
    handles = [
        Line2D(
            [],
            [],
            color=line.color,
            linestyle=line.dashes,
            linewidth=1.8,
            label=labels[line.name],
        )
        for line in view.sides
    ]
    if has_bursts:
        handles.append(
            Line2D([], [], color=view.palette.muted, linestyle=":", label="burst")
        )
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=1 if view.is_narrow and not has_bursts else 3,
        frameon=False,
        borderaxespad=0.2,
        handlelength=2.2,
        labelcolor=view.palette.ink,
    )


def _all_ms(view: BenchView) -> Floats:
    return np.concatenate([line.latency_ms_R for line in view.sides])


@dataclass(frozen=True, slots=True)
class Design:
    """How one plot is made."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes, BenchView], None]


DESIGNS = (
    Design(
        "cdf",
        "How round times are spread",
        "The share of rounds that took at most so long, on a logarithmic axis; further "
        "left is faster. Look at the top, where the curves turn: a synchronous step "
        "waits for that tail. The dotted line is at 95 %.",
        draw_cdf,
    ),
    Design(
        "rounds",
        "Round by round",
        "Both took their turns in the same round, one after the other, so a busy "
        "moment of the machine shows in both lines.",
        draw_rounds,
    ),
)

"""The report's four plots, and the picture of a run for a README.

Draws what ``series`` makes of the records. This module needs matplotlib, so it is
imported only where a plot is made. Each plot comes twice, for a wide page and for a
phone, since text that shrinks with a picture is not legible.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from tailbound.records import Record
from tailbound.report import series
from tailbound.report.drawing import (
    LABELS,
    LEAST_MS,
    MARKERS,
    View,
    add_legend,
    draw_line,
    label_bursts,
    log_axis,
    mark_bursts,
    mark_critical,
    say_no_data,
    style,
    whole_ticks,
)
from tailbound.report.outcome import Summary
from tailbound.report.palette import LIGHT, THEMED
from tailbound.report.series import RunRecords, gather
from tailbound.report.svg import to_inline_svg
from tailbound.report.text import metric, number
from tailbound.report.verdict import headline


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of the report, ready to stand in a page."""

    title: str
    caption: str
    """What to look at."""
    wide_svg: str
    """For 760 CSS pixels."""
    narrow_svg: str
    """For 340 CSS pixels."""


def render_plots(summary: Summary, records: Iterable[Record]) -> list[Plot]:
    """Draw the plots of DBLP's figures 2, 3 and 6, and the control traffic.

    Args:
        summary: of these records.
        records: read once.

    Returns:
        Latency per step, its distribution, metric per epoch, probes and
        retransmissions. A plot without data says so.
    """
    runs = compared_runs(records)
    plots = []
    for design in DESIGNS:
        wide_svg, narrow_svg = (
            draw_svg(design, View(summary, runs, THEMED, is_narrow))
            for is_narrow in (False, True)
        )
        caption = design.caption(has_bursts=bool(summary.settings.burst_rounds))
        plots.append(Plot(design.title, caption, wide_svg, narrow_svg))
    return plots


def overview_png(summary: Summary, records: Iterable[Record], path: Path) -> None:
    """Write a picture of the run, 1800 pixels wide, legible at half of that.

    Args:
        summary: of these records.
        records: read once.
        path: where to write; what was there is replaced.
    """
    view = View(summary, compared_runs(records), LIGHT)
    with style(LIGHT, font_size=9.0):
        figure = Figure((9.0, 5.9), dpi=200, layout="constrained", facecolor=LIGHT.page)
        mosaic = figure.subplot_mosaic([["latency"] * 2, ["cdf", "metric"]])
        draw_latency([mosaic["latency"]], view)
        half = replace(view, is_narrow=True)
        draw_cdf([mosaic["cdf"]], half)
        draw_metric([mosaic["metric"]], half)
        figure.suptitle(headline(summary), fontsize=13, fontweight="bold", x=0.5)
        figure.savefig(path, format="png", metadata={"Software": None})


def draw_svg(design: "Design", view: View) -> str:
    """Draw one plot for one width."""
    size = (340, design.narrow_height) if view.is_narrow else (760, design.wide_height)
    with style(view.palette, font_size=11.0 if view.is_narrow else 12.0):
        figure = Figure((size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        axes = [
            figure.add_subplot(design.panels, 1, row)
            for row in range(1, design.panels + 1)
        ]
        design.draw(axes, view)
        prefix = f"{design.name}-{'narrow' if view.is_narrow else 'wide'}"
        return to_inline_svg(figure, prefix=prefix, label=design.title)


def draw_latency(axes: list[Axes], view: View) -> None:
    """Slowest worker's latency per step (DBLP, figure 2), on one log axis."""
    ax = axes[0]
    drawn = []
    for run, records in view.runs.items():
        step_S, latency_S = series.slowest_ms(records.way_in)
        if len(step_S):
            latency_S = np.maximum(latency_S, LEAST_MS)
            draw_line(ax, view, run, step_S, latency_S)
            drawn.append(latency_S)
    ax.set_ylabel("send latency (ms)")
    ax.set_xlabel("optimizer step")
    if not drawn:
        say_no_data(ax, view, "no round was recorded")
        return
    log_axis(ax, "y", np.concatenate(drawn), room=1.5)
    mark_critical(ax, view)
    mark_bursts(ax, view)
    label_bursts(ax, view)
    whole_ticks(ax, view)
    add_legend(ax, view, {}, with_marks=True)


def draw_cdf(axes: list[Axes], view: View) -> None:
    """Distribution of all way-in latencies (DBLP, figure 3), log x."""
    ax = axes[0]
    drawn, notes = [], {}
    for run, records in view.runs.items():
        latency_R = np.sort(np.maximum(series.latencies_ms(records.way_in), LEAST_MS))
        if len(latency_R):
            share_R = np.arange(1, len(latency_R) + 1) / len(latency_R)
            dashes = "--" if run == "fixed" else "-"
            ax.step(
                np.concatenate((latency_R[:1], latency_R)),
                np.concatenate(([0.0], share_R)),
                where="post",
                color=view.color(run),
                linestyle=dashes,
                linewidth=1.8,
            )
            drawn.append(latency_R)
            notes[run] = f"p99 {number(float(np.percentile(latency_R, 99.0)))} ms"
    ax.set_ylabel("share of rounds (%)")
    ax.set_xlabel("send latency (ms)")
    if not drawn:
        say_no_data(ax, view, "no round was recorded")
        return
    log_axis(ax, "x", np.concatenate(drawn), room=1.1)
    ax.set_ylim(0.0, 1.02)
    ax.yaxis.set_major_locator(FixedLocator([0.0, 0.25, 0.5, 0.75, 1.0]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    ax.axhline(0.99, color=view.palette.muted, linewidth=0.8, linestyle=":")
    add_legend(ax, view, notes, dashed="fixed")


def draw_metric(axes: list[Axes], view: View) -> None:
    """Held-out metric per epoch (DBLP, figure 6)."""
    ax = axes[0]
    notes, names, last_epoch = {}, [], 0
    for run, records in view.runs.items():
        epoch_E, metric_E = series.mean_metric(records.epochs)
        if len(epoch_E):
            ax.plot(
                epoch_E,
                metric_E,
                color=view.color(run),
                marker=MARKERS[run],
                markersize=5.0,
                linewidth=1.8,
                linestyle="--" if run == "fixed" else "-",
            )
            notes[run] = f"{metric(float(metric_E[-1]))} at the end"
            names.append(records.epochs[-1].metric_name)
            last_epoch = max(last_epoch, int(epoch_E[-1]))
    ax.set_xlabel("epoch")
    ax.set_ylabel(names[0] if names else "metric")
    if not names:
        say_no_data(ax, view, "no epoch was finished")
        return
    ax.set_xlim(0.7, last_epoch + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    ax.margins(y=0.12)
    add_legend(ax, view, notes, dashed="fixed", with_markers=True)


def draw_control(axes: list[Axes], view: View) -> None:
    """Probes and retransmitted chunks of a round, over the steps."""
    panels = (
        (axes[0], series.mean_probes, "probes per round"),
        (axes[1], series.mean_retransmitted, "chunks resent per round"),
    )
    has_data = False
    for ax, make_series, label in panels:
        for run, records in view.runs.items():
            step_S, value_S = make_series(records.way_in)
            if len(step_S):
                draw_line(ax, view, run, step_S, value_S)
                has_data = True
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0.0)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        whole_ticks(ax, view)
        if has_data:
            mark_critical(ax, view)
            mark_bursts(ax, view)
        else:
            say_no_data(ax, view, "no round was recorded")
    axes[1].set_xlabel("optimizer step")
    axes[0].figure.align_ylabels(axes)
    if has_data:
        axes[1].sharex(axes[0])
        axes[0].tick_params(labelbottom=False)
        add_legend(axes[0], view, {}, with_marks=True)


def compared_runs(records: Iterable[Record]) -> dict[str, RunRecords]:
    """The records of the two runs that are compared, fixed first."""
    runs = gather(records)
    return {name: runs[name] for name in LABELS if name in runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How one plot is made."""

    name: str
    """Unique on the page."""
    title: str
    what: str
    """Caption: what is drawn."""
    at_bursts: str = ""
    """Caption: what to look at in burst rounds, if there are any."""
    look: str = ""
    """Caption: what else to look at."""
    draw: Callable[[list[Axes], View], None]
    panels: int = 1
    wide_height: int
    """CSS pixels."""
    narrow_height: int

    def caption(self, *, has_bursts: bool) -> str:
        """What is drawn, and what to look at."""
        parts = (self.what, self.at_bursts if has_bursts else "", self.look)
        return " ".join(filter(None, parts))


DESIGNS = (
    Design(
        name="latency",
        title="Send latency, step by step",
        what=(
            "One point is the slowest worker of a step, from its first datagram to the "
            "stop, on a logarithmic axis."
        ),
        at_bursts=(
            "Look at the burst rounds: there the fixed bound pays one control round "
            "trip after another, and the phase-aware bound stops early."
        ),
        look=(
            "In the shaded critical regions both bounds are the same, and so are the "
            "lines."
        ),
        draw=draw_latency,
        wide_height=330,
        narrow_height=290,
    ),
    Design(
        name="cdf",
        title="How latencies are spread",
        what=(
            "The share of all rounds (every step, every worker) that took at most so "
            "long; further left is faster."
        ),
        look=(
            "Look at the top right, where the curves turn: that is the tail that a "
            "synchronous step waits for. The dotted line is at 99 %."
        ),
        draw=draw_cdf,
        wide_height=300,
        narrow_height=260,
    ),
    Design(
        name="metric",
        title="What it cost: held-out metric",
        what="On held-out data, after each epoch.",
        look=(
            "Look at the gap between the lines at the end: it is the price of the "
            "gradients that were given up."
        ),
        draw=draw_metric,
        wide_height=270,
        narrow_height=240,
    ),
    Design(
        name="control",
        title="Round trips and repairs",
        what=(
            "Means over the workers of a step. Above, probes: each costs a round trip. "
            "Below, chunks that were sent again."
        ),
        at_bursts=(
            "Look at the burst rounds: the fixed bound probes and repairs until almost "
            "nothing is missing, the phase-aware bound lets the rest go."
        ),
        draw=draw_control,
        panels=2,
        wide_height=400,
        narrow_height=380,
    ),
)

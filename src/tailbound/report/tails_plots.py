"""The plots of the four runs: step times, threshold, batch sizes, loss, ranks.

Needs matplotlib, so it is imported only where a plot is made. As in ``plots``, each
comes for a wide page and for a phone.
Source: DropCompute, figures experiement_vs_theory, choosing_threshold, batch_dist.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tailbound.records import Record
from tailbound.report.drawing import say_no_data, style
from tailbound.report.palette import THEMED, Palette
from tailbound.report.plots import Plot
from tailbound.report.series import RunRecords, gather
from tailbound.report.svg import to_inline_svg
from tailbound.report.tails import (
    NAMES,
    RUNS,
    by_step,
    first_bounded_step,
    smooth_loss,
    step_s,
)

BINS = 40
DASHES: dict[str, Any] = {
    "neither": "-",
    "compute": (0, (5, 1.5)),
    "network": (0, (1, 1.2)),
    "both": "-",
}


@dataclass(frozen=True, slots=True)
class TailView:
    """What a drawing needs to know: what to draw, in which colours, how wide."""

    runs: dict[str, RunRecords]
    palette: Palette
    is_narrow: bool = False

    def line(self, run: str) -> dict[str, Any]:
        """How a run's line looks; lines differ without colour too."""
        colors = {
            "neither": self.palette.muted,
            "compute": self.palette.fixed,
            "network": self.palette.adaptive,
            "both": self.palette.ink,
        }
        return {
            "color": colors[run],
            "linestyle": DASHES[run],
            "linewidth": 2.0 if run == "both" else 1.5,
            "label": NAMES[run],
        }

    @property
    def decided(self) -> tuple[str, RunRecords] | None:
        """The first run with a decision of the compute bound."""
        return next(((n, run) for n, run in self.runs.items() if run.thresholds), None)


def render_tail_plots(records: Iterable[Record]) -> list[Plot]:
    """Draw all plots; one without data says so.

    Args:
        records: of the four runs, or of any runs with a compute bound; read once.
    """
    found = gather(records)
    runs = {name: found[name] for name in RUNS if name in found}
    plots = []
    for design in DESIGNS:
        wide, narrow = (
            draw_svg(design, TailView(runs, THEMED, is_narrow))
            for is_narrow in (False, True)
        )
        plots.append(Plot(design.title, design.caption, wide, narrow))
    return plots


def draw_svg(design: "Design", view: TailView) -> str:
    """Draw one plot for one width."""
    width, height = (340, 300) if view.is_narrow else (760, 320)
    with style(view.palette, font_size=11.0 if view.is_narrow else 12.0):
        figure = Figure((width / 72, height / 72), dpi=72, layout="constrained")
        design.draw(figure.add_subplot(), view)
        prefix = f"{design.name}-{'narrow' if view.is_narrow else 'wide'}"
        return to_inline_svg(figure, prefix=prefix, label=design.title)


def draw_steps(ax: Axes, view: TailView) -> None:
    """Distribution of step times, one outline a run."""
    skip = first_bounded_step(view.runs) - 1
    times = {n: 1e3 * step_s(run, skip=skip) for n, run in view.runs.items()}
    times = {name: time_ms for name, time_ms in times.items() if len(time_ms)}
    ax.set_xlabel("step time (ms)")
    ax.set_ylabel("share of steps")
    if not times:
        say_no_data(ax, view, "no step was recorded")
        return
    # One outlier must not squeeze all others into a corner.
    most = max(float(np.percentile(time_ms, 99)) for time_ms in times.values())
    edges = np.linspace(min(t.min() for t in times.values()), 1.02 * most, BINS + 1)
    for name, time_ms in times.items():
        counts, _ = np.histogram(np.minimum(time_ms, edges[-1]), edges)
        ax.stairs(counts / len(time_ms), edges, **view.line(name))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend(ax, view)


def draw_threshold(ax: Axes, view: TailView) -> None:
    """Speedup and dropped share over the threshold, as the first choice saw them."""
    ax.set_xlabel("threshold (ms)")
    ax.set_ylabel("effective speedup, share dropped")
    if view.decided is None:
        say_no_data(ax, view, "no threshold was chosen")
        return
    report = view.decided[1].thresholds[0]
    threshold_ms = 1e3 * np.array(report.curve_threshold_s_K)
    ax.plot(
        threshold_ms,
        report.curve_speedup_K,
        color=view.palette.adaptive,
        linewidth=1.8,
        label="effective speedup",
    )
    ax.plot(
        threshold_ms,
        report.curve_drop_K,
        color=view.palette.fixed,
        linewidth=1.5,
        linestyle="--",
        label="share dropped",
    )
    if report.threshold_s is not None:
        ax.axvline(
            1e3 * report.threshold_s,
            color=view.palette.ink,
            linewidth=1.0,
            linestyle=":",
            label=f"chosen: {1e3 * report.threshold_s:.0f} ms",
        )
    ax.set_ylim(bottom=0.0)
    legend(ax, view)


def draw_batches(ax: Axes, view: TailView) -> None:
    """Micro-batches of a step, over all ranks: how often each number occurs."""
    ax.set_xlabel("micro-batches in a step's gradient, all ranks")
    ax.set_ylabel("share of steps")
    bounded = {
        name: np.array(
            [
                reports[0].total_computed
                for reports in by_step(run)
                if reports[0].threshold_s is not None
            ]
        )
        for name, run in view.runs.items()
    }
    bounded = {name: counts for name, counts in bounded.items() if len(counts)}
    if not bounded:
        say_no_data(ax, view, "no step had a threshold")
        return
    most = max(reports[0].total_planned for reports in by_step_all(view))
    least = min(float(counts.min()) for counts in bounded.values())
    edges = np.arange(np.floor(least) - 0.5, most + 1.0)
    for name, counts in bounded.items():
        shares, _ = np.histogram(counts, edges)
        ax.stairs(shares / len(counts), edges, **view.line(name))
    ax.axvline(
        most, color=view.palette.muted, linewidth=1.0, linestyle=":", label="planned"
    )
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(ax, view)


def by_step_all(view: TailView) -> list[list[Any]]:
    """The steps of all runs."""
    return [reports for run in view.runs.values() for reports in by_step(run)]


def draw_loss(ax: Axes, view: TailView) -> None:
    """Training loss over the time that steps took."""
    ax.set_xlabel("training time (s)")
    ax.set_ylabel("training loss")
    is_empty = True
    for name, run in view.runs.items():
        loss_S, spent_s = smooth_loss(run), np.cumsum(step_s(run))
        if len(loss_S) and len(loss_S) == len(spent_s):
            ax.plot(spent_s, loss_S, **view.line(name))
            is_empty = False
    if is_empty:
        say_no_data(ax, view, "no loss was recorded")
        return
    legend(ax, view)


def draw_ranks(ax: Axes, view: TailView) -> None:
    """Dropped share and the two scores of each rank, at the last look."""
    ax.set_xlabel("rank")
    if view.decided is None:
        say_no_data(ax, view, "no threshold was chosen")
        return
    report = view.decided[1].thresholds[-1]
    for shift, values_W, color, marker, label in (
        (
            -0.1,
            report.relative_score_W,
            view.palette.adaptive,
            "s",
            "speed, fastest = 1",
        ),
        (0.1, report.individual_score_W, view.palette.ink, "^", "its own best = 1"),
        (0.0, report.dropped_share_W, view.palette.fixed, "o", "share dropped"),
    ):
        ax.plot(
            np.arange(len(values_W)) + shift,
            values_W,
            color=color,
            marker=marker,
            linestyle="",
            label=label,
        )
    ax.set_ylim(0.0, 1.1)
    ax.set_xlim(-0.5, len(report.dropped_share_W) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    legend(ax, view)


def legend(ax: Axes, view: TailView) -> None:
    """Say above the plot which line is which."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2 if view.is_narrow else 4,
        frameon=False,
        borderaxespad=0.2,
        labelcolor=view.palette.ink,
    )


@dataclass(frozen=True, slots=True)
class Design:
    """How one plot is made."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes, TailView], None]


DESIGNS = (
    Design(
        "steps",
        "How long a step takes",
        "All ranks wait for the slowest. A compute bound cuts the tail off; the last "
        "bar holds all steps beyond it.",
        draw_steps,
    ),
    Design(
        "threshold",
        "What each threshold would bring",
        "Computed from the calibration steps: a short threshold makes steps fast and "
        "drops much, a long one does neither.",
        draw_threshold,
    ),
    Design(
        "batches",
        "How large the batch is",
        "Under a threshold a step's batch varies; its gradient is divided by what was "
        "computed.",
        draw_batches,
    ),
    Design(
        "loss",
        "Loss against time",
        "The training loss, averaged over a tenth of the steps: fewer micro-batches a "
        "step, and more steps a second.",
        draw_loss,
    ),
    Design(
        "ranks",
        "Rank by rank",
        "At the last look of the compute bound. A straggler that moves leaves all "
        "ranks alike; one that stays has low speeds and most of the drops.",
        draw_ranks,
    ),
)

"""What the plots are drawn with: lines, marks, legends and axes in the report's style.

Every function takes a :class:`View`, which says what is drawn, in which colours, and
how wide. Needs matplotlib.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tailbound.report import series
from tailbound.report.outcome import Summary
from tailbound.report.palette import LIGHT, Palette
from tailbound.report.series import RunRecords
from tailbound.report.text import number

LABELS = {"fixed": "fixed bound", "adaptive": "phase-aware bound"}
MARKERS = {"fixed": "o", "adaptive": "s"}
WIDTHS = {"fixed": 1.1, "adaptive": 1.5}
LEAST_MS = 1e-3
"""Logarithmic axes start here: a clock does not tell less apart."""
MOST_BURST_LABELS = 8
"""With more bursts than this, numbers beside them would overlap: none is written."""

Place = tuple[tuple[float, float], Literal["center", "left", "right"], str]
LABEL_PLACES: dict[str, Place] = {
    "fixed": ((0.0, 6.0), "center", "bottom"),
    "right": ((7.0, 0.0), "left", "center"),
    "left": ((-7.0, 0.0), "right", "center"),
}
"""Offset in points and alignment: fixed above its peak, adaptive beside its own."""


@dataclass(frozen=True, slots=True)
class View:
    """What a drawing needs to know: what to draw, in which colours, how wide."""

    summary: Summary
    runs: dict[str, RunRecords]
    """The runs that left records, fixed first."""
    palette: Palette
    is_narrow: bool = False

    def color(self, run: str) -> str:
        """The run's series colour."""
        return {"fixed": self.palette.fixed, "adaptive": self.palette.adaptive}[run]


def draw_line(
    ax: Axes, view: View, run: str, x_S: series.Ints, y_S: series.Floats
) -> None:
    """One run's values over the steps."""
    ax.plot(
        x_S,
        y_S,
        color=view.color(run),
        linewidth=WIDTHS[run],
        marker=MARKERS[run] if len(x_S) == 1 else "",
        zorder=3,
    )


def mark_critical(ax: Axes, view: View) -> None:
    """Shade the steps that ran under the phase-aware run's critical bound."""
    if "adaptive" in view.runs:
        for first, last in series.critical_spans(view.runs["adaptive"].way_in):
            ax.axvspan(
                first - 0.5, last + 0.5, color=view.palette.critical, lw=0, zorder=0
            )


def mark_bursts(ax: Axes, view: View) -> None:
    """A dotted line at each burst round."""
    for burst_round in view.summary.settings.burst_rounds:
        ax.axvline(
            burst_round,
            color=view.palette.muted,
            linewidth=0.9,
            linestyle=":",
            zorder=1,
        )


def label_bursts(ax: Axes, view: View) -> None:
    """A marker and a number on each run's burst rounds."""
    for run, splits in view.summary.burst_split.items():
        for split in splits:
            if split is None or len(splits) > MOST_BURST_LABELS:
                continue
            height = max(split.latency_ms, LEAST_MS)
            ax.plot(
                [split.round],
                [height],
                color=view.color(run),
                marker=MARKERS[run],
                markersize=5.0,
                zorder=4,
            )
            offset, across, up = LABEL_PLACES[
                run
                if run == "fixed"
                else "left"
                if is_late(ax, split.round)
                else "right"
            ]
            text = ax.annotate(
                number(split.latency_ms),
                (split.round, height),
                offset,
                textcoords="offset points",
                ha=across,
                va=up,
                color=view.color(run),
                fontweight="bold",
                zorder=5,
            )
            if view.palette is LIGHT:
                text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])


def is_late(ax: Axes, step: int) -> bool:
    """Whether a step is so far right that no number fits beside it."""
    first, last = ax.get_xlim()
    return step > first + 0.85 * (last - first)


def add_legend(
    ax: Axes,
    view: View,
    notes: dict[str, str],
    *,
    dashed: str = "",
    with_marks: bool = False,
    with_markers: bool = False,
) -> None:
    """Say above the plot which line is which, with a note for each run."""
    handles: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            color=view.color(run),
            linewidth=2.0,
            linestyle="--" if run == dashed else "-",
            marker=MARKERS[run] if with_markers else "",
            label=f"{LABELS[run]}, {notes[run]}" if run in notes else LABELS[run],
        )
        for run in view.runs
    ]
    if with_marks and view.summary.settings.burst_rounds:
        handles.append(
            Line2D([], [], color=view.palette.muted, linestyle=":", label="burst round")
        )
    if with_marks and "adaptive" in view.runs:
        handles.append(Patch(color=view.palette.critical, label="critical region"))
    columns = 1 if view.is_narrow and notes else 2 if view.is_narrow else len(handles)
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
        labelcolor=view.palette.ink,
    )


def log_axis(ax: Axes, which: str, values: series.Floats, *, room: float) -> None:
    """A logarithmic axis around the values, with plain numbers at few ticks."""
    low, high = float(values.min()) / 1.15, float(values.max()) * room
    axis = ax.yaxis if which == "y" else ax.xaxis
    (ax.set_yscale if which == "y" else ax.set_xscale)("log")
    (ax.set_ylim if which == "y" else ax.set_xlim)(low, high)
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    spread = high / low
    firsts = (
        (1, 1.5, 2, 3, 5, 7) if spread < 25 else (1, 2, 5) if spread < 300 else (1,)
    )
    ticks = [first * 10.0**exponent for exponent in exponents for first in firsts]
    axis.set_major_locator(
        FixedLocator([tick for tick in ticks if low <= tick <= high])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def whole_ticks(ax: Axes, view: View) -> None:
    """Steps are whole numbers, and fewer of them fit on a phone."""
    ticks = 5 if view.is_narrow else 10
    ax.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))
    ax.margins(x=0.01)


def say_no_data(ax: Axes, view: View, reason: str) -> None:
    """An empty plot says why."""
    ax.text(
        0.5,
        0.5,
        reason,
        transform=ax.transAxes,
        ha="center",
        va="center",
        color=view.palette.muted,
    )
    ax.set_xticks([])
    ax.set_yticks([])


@contextmanager
def style(palette: Palette, *, font_size: float) -> Iterator[None]:
    """Draw in these colours, in a font that matplotlib brings, without markup.

    A name that the font has no glyph for is drawn as boxes in a PNG, and as itself in
    an SVG; that is no reason to warn.
    """
    settings: dict[Any, Any] = {  # keys are literals in some releases of matplotlib
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "text.parse_math": False,
        "text.color": palette.ink,
        "axes.labelcolor": palette.muted,
        "axes.edgecolor": palette.rule,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": palette.rule,
        "grid.linewidth": 0.7,
        "xtick.color": palette.rule,
        "ytick.color": palette.rule,
        "xtick.labelcolor": palette.muted,
        "ytick.labelcolor": palette.muted,
    }
    with rc_context(), warnings.catch_warnings():
        rcdefaults()  # a user's matplotlibrc does not change the report
        rcParams.update(settings)
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield

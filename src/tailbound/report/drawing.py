"""What the plots are drawn with: lines, marks, legends and axes in the report's style.

Every function takes a :class:`View`, which says what is drawn, in which colours, and
how wide. Needs matplotlib.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tailbound.report import series
from tailbound.report.outcome import BurstSplit, Summary
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
    "above": ((0.0, 6.0), "center", "bottom"),
    "right": ((7.0, 0.0), "left", "center"),
    "left": ((-7.0, 0.0), "right", "center"),
}
"""Offset in points, and alignment across and up."""

LOG_TICKS = (
    (4.0, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
    (25.0, (1, 1.5, 2, 3, 5, 7)),
    (300.0, (1, 2, 5)),
    (math.inf, (1,)),
)
"""Ticks within a decade, for axes whose ends are less than so many times apart."""


@dataclass(frozen=True, slots=True)
class View:
    """What a drawing needs to know: what to draw, in which colours, how wide."""

    summary: Summary
    runs: dict[str, RunRecords]
    """The runs that left records, fixed first."""
    palette: Palette
    is_narrow: bool = False

    @property
    def bursts(self) -> list[int]:
        """The burst rounds that a run reached."""
        last = max(
            (report.step for run in self.runs.values() for report in run.way_in),
            default=0,
        )
        return [n for n in self.summary.settings.burst_rounds if n <= last]

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
    """A dotted line at each burst round that was reached."""
    for burst_round in view.bursts:
        ax.axvline(
            burst_round,
            color=view.palette.muted,
            linewidth=0.9,
            linestyle=":",
            zorder=1,
        )


def label_bursts(ax: Axes, view: View) -> None:
    """A marker and a number on each run's burst rounds."""
    splits = view.summary.burst_split
    pairs = list(zip(splits["fixed"], splits["adaptive"], strict=True))
    if len(pairs) > MOST_BURST_LABELS:
        return
    for fixed, adaptive in pairs:
        for run, split in (("fixed", fixed), ("adaptive", adaptive)):
            if split is not None:
                height = max(split.latency_ms, LEAST_MS)
                place = place_label(ax, run, fixed, adaptive)
                label_point(ax, view, run, split.round, height, place)


def place_label(
    ax: Axes, run: str, fixed: BurstSplit | None, adaptive: BurstSplit | None
) -> str:
    """Where a number has room: fixed above, adaptive beside, apart if they meet."""
    known = fixed or adaptive
    assert known is not None
    first, last = ax.get_xlim()
    position = (known.round - first) / (last - first)
    if run == "adaptive":
        return "right" if position < 0.85 else "left"
    meet = adaptive is not None and known.latency_ms < 1.3 * adaptive.latency_ms
    return "left" if meet and 0.1 < position < 0.85 else "above"


def label_point(
    ax: Axes, view: View, run: str, step: int, height: float, place: str
) -> None:
    """A run's marker at a point, and the height in digits beside it."""
    color = view.color(run)
    ax.plot([step], [height], color=color, marker=MARKERS[run], markersize=5, zorder=4)
    offset, across, up = LABEL_PLACES[place]
    text = ax.annotate(
        number(height),
        (step, height),
        offset,
        textcoords="offset points",
        ha=across,
        va=up,
        color=color,
        fontweight="bold",
        zorder=5,
    )
    if view.palette is LIGHT:  # an SVG gets its halo from the page's style
        halo = withStroke(linewidth=2.5, foreground=view.palette.page)
        text.set_path_effects([halo])


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
    if with_marks and view.bursts:
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
    firsts = next(firsts for limit, firsts in LOG_TICKS if high / low < limit)
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


class Colored(Protocol):
    """What has a palette."""

    @property
    def palette(self) -> Palette:
        """The colours to draw in."""
        ...


def say_no_data(ax: Axes, view: Colored, reason: str) -> None:
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

"""The plots of a plan: what each threshold does, how latencies are spread, other sizes.

Needs matplotlib, so it is imported only where a plot is made. As in ``plots``, each
comes for a wide page and for a phone.
Source: DropCompute, figures choosing_threshold and speedup; spec C9.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tailbound.compute.plan_words import percent, seconds, times
from tailbound.compute.plans import Estimate, Plan
from tailbound.compute.samples import Floats
from tailbound.report.drawing import say_no_data, style
from tailbound.report.palette import LIGHT, THEMED, Palette
from tailbound.report.plots import Plot
from tailbound.report.svg import to_inline_svg

MOST_DROP = 0.65
"""Thresholds that drop more are not drawn: nobody would choose one."""
BINS = 60
DASHES = (
    (0.0, (1.0, 1.5)),
    (0.0, (5.0, 2.0)),
    (0.0, (5.0, 1.5, 1.0, 1.5)),
    (0.0, (8.0, 2.0, 2.0, 2.0, 2.0, 2.0)),
)
"""Dashes of the estimates, from small to large."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """What a drawing needs to know: what to draw, in which colours, how wide."""

    plan: Plan
    latency_s_SWM: Floats
    """Of the trace; NaN where a threshold cut a step."""
    palette: Palette
    is_narrow: bool = False


def render_plan_plots(plan: Plan, latency_s_SWM: Floats) -> list[Plot]:
    """Draw a plan's plots for a page.

    Args:
        plan: of the trace.
        latency_s_SWM: of the trace.

    Returns:
        Threshold, latencies, drop rates.
    """
    plots = []
    for design in DESIGNS:
        wide_svg, narrow_svg = (
            draw_svg(design, PlanView(plan, latency_s_SWM, THEMED, is_narrow))
            for is_narrow in (False, True)
        )
        plots.append(Plot(design.title, design.caption, wide_svg, narrow_svg))
    return plots


def write_plan_pngs(folder: Path, plan: Plan, latency_s_SWM: Floats) -> list[Path]:
    """Draw the same as pictures, 1500 pixels wide and legible at half of that.

    Args:
        folder: gets ``threshold.png``, ``latencies.png`` and ``drops.png``; what was
            there is replaced.
        plan: of the trace.
        latency_s_SWM: of the trace.

    Returns:
        The files.
    """
    view = PlanView(plan, latency_s_SWM, LIGHT)
    paths = []
    for design in DESIGNS:
        with style(LIGHT, font_size=9.0):
            size = (7.5, design.wide_height / 100)
            figure = Figure(size, dpi=200, layout="constrained", facecolor=LIGHT.page)
            design.draw(figure, view)
            figure.suptitle(design.title, fontsize=11, fontweight="bold", x=0.5)
            paths.append(folder / f"{design.name}.png")
            figure.savefig(paths[-1], format="png", metadata={"Software": None})
    return paths


def draw_svg(design: "Design", view: PlanView) -> str:
    """Draw one plot for one width."""
    size = (340, design.narrow_height) if view.is_narrow else (760, design.wide_height)
    with style(view.palette, font_size=11.0 if view.is_narrow else 12.0):
        figure = Figure((size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        design.draw(figure, view)
        prefix = f"{design.name}-{'narrow' if view.is_narrow else 'wide'}"
        return to_inline_svg(figure, prefix=prefix, label=design.title)


def draw_threshold(figure: Figure, view: PlanView) -> None:
    """Speedups over the threshold, and below what it drops."""
    plan, palette = view.plan, view.palette
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    threshold_s_K = np.array(plan.curve.threshold_s_K)
    dropped_share_K = np.array(plan.curve.dropped_share_K)
    drawn_K = dropped_share_K <= MOST_DROP
    x_K = threshold_s_K[drawn_K]
    for name, value_K, color, dashes, width in (
        ("step alone", plan.curve.step_speedup_K, palette.muted, "--", 1.4),
        ("effective", plan.curve.speedup_K, palette.adaptive, "-", 2.2),
    ):
        y_K = np.array(value_K)[drawn_K]
        above.plot(x_K, y_K, color=color, linestyle=dashes, linewidth=width, label=name)
    below.plot(x_K, 100.0 * dropped_share_K[drawn_K], color=palette.fixed, linewidth=2)
    over_K = x_K[dropped_share_K[drawn_K] > plan.max_drop]
    for ax in (above, below):
        ax.margins(x=0.0)
        if len(over_K):
            ax.axvspan(x_K[0], over_K[-1], color=palette.critical, lw=0, zorder=0)
        if plan.threshold_s is not None:
            ax.axvline(plan.threshold_s, color=palette.ink, linewidth=1, linestyle=":")
    if plan.threshold_s is not None:
        above.plot(
            [plan.threshold_s],
            [plan.speedup],
            color=palette.adaptive,
            marker="s",
            markersize=6,
            zorder=4,
            linestyle="",
            label=f"best: {seconds(plan.threshold_s)}, {times(plan.speedup)}",
        )
    if len(over_K):
        above.fill_between(
            [], [], color=palette.critical, label=f"over {percent(plan.max_drop)} drop"
        )
    above.axhline(1.0, color=palette.muted, linewidth=0.8)
    gain = max(0.05, max(np.array(plan.curve.speedup_K)[drawn_K]) - 1.0)
    # The step's own speedup may leave the plot, so that the effective one has room.
    above.set_ylim(top=1.0 + 2.0 * gain)
    below.axhline(100 * plan.max_drop, color=palette.muted, linewidth=1, linestyle=":")
    above.set_ylabel("speedup (×)")  # noqa: RUF001
    below.set_ylabel("dropped (%)")
    below.set_ylim(bottom=0.0)
    below.set_xlabel("threshold (s of compute in a step)")
    figure.align_ylabels((above, below))
    legend(above, view, columns=2 if view.is_narrow else 4)


def draw_latencies(figure: Figure, view: PlanView) -> None:
    """Histograms of micro-batches, and of workers' and slowest workers' steps."""
    plan, palette = view.plan, view.palette
    left, right = panels(figure, view)
    persistent = np.isin(list(plan.step_s_W), plan.persistent_stragglers)
    groups = [(view.latency_s_SWM[:, ~persistent], palette.adaptive, "all workers")]
    if persistent.any():
        slow = view.latency_s_SWM[:, persistent]
        groups = [
            (groups[0][0], palette.adaptive, "other workers"),
            (slow, palette.fixed, "slow all the time"),
        ]
    samples = [group[~np.isnan(group)] for group, _, _ in groups]
    edges = bin_edges(np.concatenate(samples))
    total = sum(len(sample) for sample in samples)
    for sample, (_, color, label) in zip(samples, groups, strict=True):
        histogram(left, sample, edges, total, color, label)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_xlabel("micro-batch (s)")
    left.set_ylabel("share of micro-batches (%)")
    legend(left, view, columns=2)
    # A cut step's time is not known.
    time_s_SW = view.latency_s_SWM.sum(axis=2)
    time_s_SW = time_s_SW[~np.isnan(time_s_SW).any(axis=1)]
    right.set_xlabel("compute in a step (s)")
    right.set_ylabel("share (%)")
    if time_s_SW.size == 0:
        say_no_data(right, view, "every step was cut")
        return
    edges = bin_edges(time_s_SW)
    longest_s = time_s_SW.max(axis=1)
    histogram(
        right, time_s_SW.ravel(), edges, time_s_SW.size, palette.adaptive, "a worker"
    )
    histogram(
        right, longest_s, edges, longest_s.size, palette.fixed, "the slowest of a step"
    )
    if plan.threshold_s is not None:
        right.axvline(plan.threshold_s, color=palette.ink, linewidth=1.2, linestyle=":")
    legend(right, view, columns=2)


def draw_drops(figure: Figure, view: PlanView) -> None:
    """Speedup over the dropped share, for other workers and other micro-batches."""
    plan = view.plan
    left, right = panels(figure, view, sharey=True)
    for ax, what, estimates in (
        (
            left,
            "workers",
            [one for one in plan.estimates if one.num_workers != plan.num_workers],
        ),
        (
            right,
            "micro-batches",
            [one for one in plan.estimates if one.num_workers == plan.num_workers],
        ),
    ):
        draw_sizes(ax, view, estimates)
        ax.set_xlabel(f"dropped at most (%), by {what}")
    left.set_ylabel("effective speedup (×)")  # noqa: RUF001
    if view.is_narrow:
        right.set_ylabel("effective speedup (×)")  # noqa: RUF001


def draw_sizes(ax: Axes, view: PlanView, estimates: list[Estimate]) -> None:
    """The trace's line, and one for each estimate; the legend tells their sizes."""
    plan, palette = view.plan, view.palette
    x_D = [100.0 * point.max_drop for point in plan.by_drop]
    trace_D = [point.speedup for point in plan.by_drop]
    size = plan.num_workers, plan.num_micro_batches
    lines = [(size, trace_D)]
    lines += [
        ((one.num_workers, one.num_micro_batches), one.speedup_by_drop)
        for one in estimates
    ]
    # Where only one of the two varies, that one is the label.
    varying = [at for at in (0, 1) if len({size[at] for size, _ in lines}) > 1] or [0]
    dashes = cycle(DASHES)
    for one, speedup_D in sorted(lines):
        is_trace = speedup_D is trace_D
        label = " × ".join(str(one[at]) for at in varying)  # noqa: RUF001
        ax.plot(
            x_D,
            speedup_D,
            color=palette.adaptive if is_trace else palette.fixed,
            linestyle="-" if is_trace else next(dashes),
            linewidth=2.2 if is_trace else 1.6,
            label=f"{label} (trace)" if is_trace else label,
        )
    ax.axhline(1.0, color=palette.muted, linewidth=0.8)
    ax.axvline(100 * plan.max_drop, color=palette.muted, linewidth=0.9, linestyle=":")
    ax.set_xlim(0.0, x_D[-1])
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    legend(ax, view, columns=2)


def panels(
    figure: Figure, view: PlanView, *, sharey: bool = False
) -> tuple[Axes, Axes]:
    """Two panels, side by side where there is room."""
    shape = (2, 1) if view.is_narrow else (1, 2)
    first, second = figure.subplots(*shape, sharey=sharey).ravel()
    return first, second


def bin_edges(value_R: Floats) -> Floats:
    """Even bins over all values, also where they are all the same."""
    low, high = float(value_R.min()), float(value_R.max())
    room = 0.5 * max(high, 1e-3) if low == high else 0.0
    return np.linspace(low - room, high + room, BINS + 1)


def histogram(
    ax: Axes, value_R: Floats, edges: Floats, total: int, color: str, label: str
) -> None:
    """A filled outline of the share of all values in each bin, in %."""
    count_B, _ = np.histogram(value_R, edges)
    share_B = 100.0 * count_B / total
    ax.stairs(share_B, edges, fill=True, color=color, alpha=0.25)
    ax.stairs(share_B, edges, color=color, linewidth=1.5, label=label)


def legend(ax: Axes, view: PlanView, *, columns: int) -> None:
    """Say above a panel which line is which."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        handlelength=2.2,
        columnspacing=1.2,
        labelcolor=view.palette.ink,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """How one plot is made."""

    name: str
    """Unique on the page, and of the picture."""
    title: str
    caption: str
    """What is drawn, and what to look at."""
    draw: Callable[[Figure, PlanView], None]
    wide_height: int
    """CSS pixels."""
    narrow_height: int


DESIGNS = (
    Design(
        name="threshold",
        title="What each threshold does",
        caption=(
            "Above, how much faster a step gets (dashed), and what is left of it since "
            "dropped micro-batches count for nothing (solid). Below, the share that is "
            "dropped. Look at the distance of the solid line from 1: further left the "
            "drop eats up the gain, further right nothing is cut."
        ),
        draw=draw_threshold,
        wide_height=430,
        narrow_height=430,
    ),
    Design(
        name="latencies",
        title="How compute times are spread",
        caption=(
            "Left, single micro-batches, on a logarithmic axis so that a rare slow one "
            "is seen. Right, whole steps: of each worker, and of the slowest, which "
            "all others wait for; the dotted line is the threshold. Look at how far "
            "the two are apart: that is what a threshold can win."
        ),
        draw=draw_latencies,
        wide_height=300,
        narrow_height=520,
    ),
    Design(
        name="drops",
        title="Speedup for each drop rate, and at other sizes",
        caption=(
            "The solid line is computed from the trace, the dashed ones are estimates "
            "for other numbers of workers (left) and micro-batches (right); the dotted "
            "line is the limit. Look at how early a line rises: more workers wait "
            "longer for their slowest."
        ),
        draw=draw_drops,
        wide_height=320,
        narrow_height=560,
    ),
)

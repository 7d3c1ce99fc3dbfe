"""The scale graph of a simulation: throughput and efficiency over workers.

Needs matplotlib, so it is imported only where a graph is drawn.

Source: DropCompute, figures abstract, noise_type and noise_scale.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tailbound.compute.simulate import ScalePoint, Simulation
from tailbound.report.drawing import log_axis, style
from tailbound.report.palette import LIGHT
from tailbound.report.series import Floats
from tailbound.report.text import number, percent, plural

LEAST_TICK_GAP = 0.09
"""Ticks of workers stand at least this share of the axis apart, to be legible."""
STRAGGLER_WORDS = {
    None: "",
    "uniform": ", uniform stragglers",
    "one_server": ", stragglers on one server",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of the graph."""

    label: str
    color: str
    marker: str
    linestyle: str
    per_s_N: Floats
    """Micro-batches per second, for each number of workers."""
    theory_per_s_N: Floats | None
    """What theory expects, where it does."""


def draw_scale_graph(
    simulation: Simulation, image_format: Literal["png", "svg"]
) -> bytes:
    """Draw baseline, DropCompute and linear scaling over the number of workers.

    On the left throughput on logarithmic axes, on the right the same as a share of
    linear scaling, where theory's expectation is dotted.

    Args:
        simulation: of at least one number of workers; drawn in rising order.
        image_format: ``png``, 1900 pixels wide and legible at half of that, or
            ``svg``, with its text as shapes.

    Returns:
        The file's bytes; the same simulation gives the same bytes.
    """
    points = sorted(simulation.points, key=lambda point: point.workers)
    workers_N = np.array([point.workers for point in points], dtype=np.float64)
    curves = make_curves(points, simulation.comm_s)
    buffer = io.BytesIO()
    fixed_ids: dict[Any, Any] = {"svg.hashsalt": "scale-graph"}
    with style(LIGHT, font_size=9.0), rc_context(fixed_ids):
        figure = Figure((9.5, 4.4), dpi=200, layout="constrained", facecolor=LIGHT.page)
        throughput, efficiency = figure.subplots(1, 2)
        draw_throughput(throughput, workers_N, curves)
        draw_efficiency(efficiency, workers_N, curves)
        for ax in (throughput, efficiency):
            worker_axis(ax, workers_N)
        figure.suptitle(headline(simulation), fontsize=12, fontweight="bold", x=0.5)
        add_legend(figure, throughput.get_lines())
        metadata = {"Software": None} if image_format == "png" else {"Date": None}
        figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def headline(simulation: Simulation) -> str:
    """What the graph shows, in one line."""
    point = max(simulation.points, key=lambda point: point.workers)
    words = f"{simulation.noise} noise{STRAGGLER_WORDS[simulation.stragglers]}"
    at = f"{words}, {plural(point.workers, 'worker')}".capitalize()
    if point.threshold_s is None:
        return f"{at}: no threshold gains anything"
    return (
        f"{at}: {number(point.speedup)} times the throughput, "
        f"{percent(point.dropped_share)} dropped"
    )


def make_curves(points: list[ScalePoint], comm_s: float) -> list[Curve]:
    """Linear scaling, DropCompute and baseline; also the legend's order."""

    def each(name: str) -> Floats:
        return np.array([getattr(point, name) for point in points], dtype=np.float64)

    linear_per_s_N = each("linear_micro_batches_per_s")
    slower_N = (each("theory_step_s") + comm_s) / (each("worker_step_s") + comm_s)
    theory_per_s_N = linear_per_s_N / slower_N
    return [
        Curve("linear scaling", LIGHT.muted, "", "--", linear_per_s_N, None),
        Curve(
            "DropCompute",
            LIGHT.adaptive,
            "s",
            "-",
            each("bounded_micro_batches_per_s"),
            theory_per_s_N * each("theory_speedup"),
        ),
        Curve(
            "baseline",
            LIGHT.fixed,
            "o",
            "-",
            each("baseline_micro_batches_per_s"),
            theory_per_s_N,
        ),
    ]


def draw_throughput(ax: Axes, workers_N: Floats, curves: list[Curve]) -> None:
    """Micro-batches per second, logarithmic."""
    for curve in curves:
        draw_curve(ax, workers_N, curve.per_s_N, curve)
    log_axis(ax, "y", np.concatenate([curve.per_s_N for curve in curves]), room=1.3)
    ax.set_ylabel("throughput (micro-batches per second)")


def draw_efficiency(ax: Axes, workers_N: Floats, curves: list[Curve]) -> None:
    """Throughput as a share of linear scaling, simulated and expected."""
    linear_per_s_N = curves[0].per_s_N
    for curve in curves:
        draw_curve(ax, workers_N, 100.0 * curve.per_s_N / linear_per_s_N, curve)
        if curve.theory_per_s_N is not None:
            share_N = 100.0 * curve.theory_per_s_N / linear_per_s_N
            ax.plot(workers_N, share_N, color=curve.color, linestyle=":", linewidth=1.4)
    ax.set_ylim(0.0, 106.0)
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_ylabel("share of linear scaling (%)")


def draw_curve(ax: Axes, workers_N: Floats, height_N: Floats, curve: Curve) -> None:
    """A line with a marker at each number of workers."""
    ax.plot(
        workers_N,
        height_N,
        color=curve.color,
        marker=curve.marker,
        markersize=4.5,
        linestyle=curve.linestyle,
        linewidth=1.6,
        label=curve.label,
        zorder=3,
    )


def worker_axis(ax: Axes, workers_N: Floats) -> None:
    """A logarithmic axis with ticks at the simulated numbers, where they have room."""
    low, high = workers_N[0] / 1.25, workers_N[-1] * 1.25
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    gap = LEAST_TICK_GAP * np.log(high / low)
    ticks = [workers_N[-1]]
    for workers in workers_N[-2::-1]:
        if np.log(ticks[-1] / workers) >= gap:
            ticks.append(workers)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    ax.set_xlabel("workers")


def add_legend(figure: Figure, lines: Sequence[Line2D]) -> None:
    """Say below the graph which line is which."""
    dotted = Line2D(
        [], [], color=LIGHT.ink, linestyle=":", label="theory, from mean and variance"
    )
    figure.legend(
        handles=[*lines, dotted],
        loc="outside lower center",
        ncols=len(lines) + 1,
        frameon=False,
        labelcolor=LIGHT.ink,
    )

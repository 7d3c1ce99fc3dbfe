"""The plots of a plan: what is on them, and that no plan breaks them."""

import re
import struct
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from msgspec.structs import replace

from report.plans import make_plan
from tailbound.compute.planner import plan
from tailbound.compute.plans import Plan
from tailbound.compute.samples import Floats
from tailbound.compute.traces import Trace
from tailbound.report.palette import THEMED
from tailbound.report.plan_plots import (
    DESIGNS,
    PlanView,
    draw_svg,
    render_plan_plots,
    write_plan_pngs,
)
from tailbound.report.plots import Plot

pytestmark = pytest.mark.slow

THRESHOLD = "What each threshold does"
LATENCIES = "How compute times are spread"
DROPS = "Speedup for each drop rate, and at other sizes"


def texts(svg: str) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def drawn(title: str, found: Plan, latency_s_SWM: Floats) -> set[str]:
    """The texts on one plot."""
    (design,) = (one for one in DESIGNS if one.title == title)
    return texts(draw_svg(design, PlanView(found, latency_s_SWM, THEMED)))


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    return {one.title: one for one in render_plan_plots(*make_plan())}


@pytest.mark.parametrize(
    ("title", "axes"),
    [
        (
            THRESHOLD,
            {"speedup (×)", "dropped (%)", "threshold (s of compute in a step)"},  # noqa: RUF001
        ),
        (
            LATENCIES,
            {
                "micro-batch (s)",
                "share of micro-batches (%)",
                "compute in a step (s)",
                "share (%)",
            },
        ),
        (
            DROPS,
            {
                "effective speedup (×)",  # noqa: RUF001
                "dropped at most (%), by workers",
                "dropped at most (%), by micro-batches",
            },
        ),
    ],
)
def test_every_axis_is_named_with_its_unit(
    plots: dict[str, Plot], title: str, axes: set[str]
) -> None:
    assert axes <= texts(plots[title].wide_svg)
    assert axes <= texts(plots[title].narrow_svg)
    assert plots[title].caption


def test_the_best_threshold_and_the_limit_are_marked() -> None:
    found, latency_s_SWM = make_plan()
    assert found.threshold_s is not None
    limited = replace(found, max_drop=0.07)

    on_it = drawn(THRESHOLD, limited, latency_s_SWM)

    best = f"best: {1e3 * found.threshold_s:.1f} ms, {found.speedup:.2f}×"  # noqa: RUF001
    assert {"step alone", "effective", "over 7 % drop", best} <= on_it
    free = drawn(THRESHOLD, replace(found, max_drop=1.0), latency_s_SWM)
    assert not any(text.startswith("over") for text in free)


def test_lines_of_other_sizes_are_told_from_the_trace_s(plots: dict[str, Plot]) -> None:
    assert {"3", "6 (trace)", "12", "24", "2", "4 (trace)", "8"} <= texts(
        plots[DROPS].wide_svg
    )


def test_where_both_sizes_vary_both_are_told() -> None:
    found, latency_s_SWM = make_plan()
    trace = Trace(latency_s_SWM, None, tuple(found.step_s_W), tuple(range(24)))
    both = plan(trace, num_workers=[12], num_micro_batches=[2, 4])

    on_it = drawn(DROPS, both, latency_s_SWM)

    assert {"6 × 4 (trace)", "12 × 2", "12 × 4"} <= on_it  # noqa: RUF001


def test_workers_that_are_slow_all_the_time_stand_apart() -> None:
    on_it = drawn(LATENCIES, *make_plan(stragglers=1))

    assert {"other workers", "slow all the time"} <= on_it


def test_a_plot_says_no_colour_of_its_own_and_ids_are_unique(
    plots: dict[str, Plot],
) -> None:
    page = "".join(one.wide_svg + one.narrow_svg for one in plots.values())

    assert re.search(r"#[0-9a-fA-F]{6}\b", page) is None
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_equal_latencies_without_a_gain_are_drawn() -> None:
    latency_s_SWM = np.full((2, 2, 2), 0.5)
    trace = Trace(latency_s_SWM, None, ("0", "1"), (0, 1))

    found = plan(trace, num_workers=[2])

    on_first = drawn(THRESHOLD, found, latency_s_SWM)
    assert not any(text.startswith("best") for text in on_first)
    assert "all workers" in drawn(LATENCIES, found, latency_s_SWM)
    assert "2 (trace)" in drawn(DROPS, found, latency_s_SWM)


def test_a_trace_of_cut_steps_only_says_that_step_times_are_not_known() -> None:
    assert "every step was cut" in drawn(LATENCIES, *make_plan(cut=True))


def test_pictures_are_1500_pixels_wide_and_the_same_each_time(tmp_path: Path) -> None:
    found, latency_s_SWM = make_plan()

    paths = write_plan_pngs(tmp_path, found, latency_s_SWM)

    assert [path.name for path in paths] == [
        "threshold.png",
        "latencies.png",
        "drops.png",
    ]
    first = [path.read_bytes() for path in paths]
    for data in first:
        width, height = struct.unpack(">II", data[16:24])
        assert (width, 500 < height < 1000) == (1500, True)
    with mpl.rc_context({"lines.linewidth": 9.0}):
        write_plan_pngs(tmp_path, found, latency_s_SWM)
    assert [path.read_bytes() for path in paths] == first

"""The plots: what is on them, and that nothing of a run can break them."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import pytest

from report.synthetic import make_records, make_settings, one_epoch, one_round
from tailbound.records import Record
from tailbound.report.plots import Plot, overview_png, render_plots
from tailbound.report.summary import RunSettings, summarise


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def plot(records: list[Record], settings: RunSettings) -> dict[str, Plot]:
    plots = render_plots(summarise(records, settings), records)
    return {one.title: one for one in plots}


pytestmark = pytest.mark.slow

SETTINGS = make_settings(epochs=4, burst_rounds=[76, 90])
RECORDS = make_records(SETTINGS)
LATENCY = "Send latency, step by step"
CDF = "How latencies are spread"
METRIC = "What it cost: held-out metric"
CONTROL = "Round trips and repairs"


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    return plot(RECORDS, SETTINGS)


@pytest.mark.parametrize(
    ("title", "axes"),
    [
        (LATENCY, ["send latency (ms)", "optimizer step"]),
        (CDF, ["share of rounds (%)", "send latency (ms)"]),
        (METRIC, ["accuracy", "epoch"]),
        (CONTROL, ["probes per round", "chunks resent per round", "optimizer step"]),
    ],
)
def test_every_axis_is_named_with_its_unit(
    plots: dict[str, Plot], title: str, axes: list[str]
) -> None:
    for svg in (plots[title].wide_svg, plots[title].narrow_svg):
        assert set(axes) <= set(texts(svg))
        assert "phase-aware bound" in " ".join(texts(svg))


def test_bursts_are_marked_with_their_latency_and_critical_regions_shaded(
    plots: dict[str, Plot],
) -> None:
    svg = plots[LATENCY].wide_svg

    assert {"burst round", "critical region"} <= set(texts(svg))
    assert svg.count("fill: var(--critical)") == 2  # one region, and its legend
    summary = summarise(RECORDS, SETTINGS)
    marked = [run.burst_ms for run in (summary.fixed, summary.adaptive) if run]
    for value in (value for values in marked for value in values if value is not None):
        assert f"{value:.1f}" in texts(svg) or f"{value:.2f}" in texts(svg)


def test_a_plot_says_no_colour_of_its_own(plots: dict[str, Plot]) -> None:
    for one in plots.values():
        for svg in (one.wide_svg, one.narrow_svg):
            assert "var(--fixed)" in svg
            assert re.search(r"#[0-9a-fA-F]{6}\b", svg) is None


def test_ids_are_unique_over_all_plots(plots: dict[str, Plot]) -> None:
    page = "".join(one.wide_svg + one.narrow_svg for one in plots.values())

    ids = re.findall(r'\bid="([^"]+)"', page)

    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="|url\()#([^")]+)', page):
        assert target in ids


def test_the_same_run_gives_the_same_plots_whatever_the_user_s_style(
    plots: dict[str, Plot],
) -> None:
    with mpl.rc_context({"font.size": 30.0, "axes.grid": False}):
        assert plot(RECORDS, SETTINGS) == plots


def test_drawing_leaves_matplotlib_s_settings_alone() -> None:
    with mpl.rc_context({"font.size": 30.0}):
        plot([], SETTINGS)
        assert mpl.rcParams["font.size"] == 30.0


def test_without_records_every_plot_says_that_there_are_none() -> None:
    plots = plot([], SETTINGS)

    assert "no round was recorded" in texts(plots[LATENCY].wide_svg)
    assert "no round was recorded" in texts(plots[CDF].wide_svg)
    assert "no epoch was finished" in texts(plots[METRIC].wide_svg)
    assert texts(plots[CONTROL].wide_svg).count("no round was recorded") == 2


def test_captions_name_bursts_only_if_there_are_any(plots: dict[str, Plot]) -> None:
    without = plot([], make_settings(burst_rounds=[]))

    assert "Look at the burst rounds" in plots[LATENCY].caption
    assert "Look at the burst rounds" not in without[LATENCY].caption


def ended_before_a_burst() -> tuple[list[Record], RunSettings]:
    return [one_round("fixed", step) for step in (1, 2)], make_settings()


def only_adaptive() -> tuple[list[Record], RunSettings]:
    settings = make_settings(burst_rounds=[1])
    return [one_round("adaptive", 1, critical=True)], settings


def only_fixed() -> tuple[list[Record], RunSettings]:
    return [one_round("fixed", 1)], make_settings(burst_rounds=[1])


def one_step_of_no_time() -> tuple[list[Record], RunSettings]:
    settings = make_settings(burst_rounds=[1])
    return [
        one_round("fixed", 1, latency_s=0.0, waiting_s=0.0),
        one_round("adaptive", 1, latency_s=4.0),
    ], settings


def many_bursts() -> tuple[list[Record], RunSettings]:
    settings = make_settings(burst_rounds=list(range(1, 21)))
    return [one_round("fixed", step) for step in range(1, 21)], settings


def bursts_that_meet_in_all_places() -> tuple[list[Record], RunSettings]:
    settings = make_settings(burst_rounds=[1, 10, 20])
    return [
        one_round(run, step) for run in ("fixed", "adaptive") for step in range(1, 21)
    ], settings


def strange_metric() -> tuple[list[Record], RunSettings]:
    return [
        one_epoch("fixed", 1, metric=float("nan"), metric_name="$x_1$ <b>-->日本"),
        one_epoch("adaptive", 1, metric_name="$x_1$"),
    ], make_settings()


@pytest.mark.parametrize(
    "make",
    [
        ended_before_a_burst,
        only_adaptive,
        only_fixed,
        one_step_of_no_time,
        many_bursts,
        bursts_that_meet_in_all_places,
        strange_metric,
    ],
)
def test_unusual_runs_are_drawn_without_a_warning(
    make: Callable[[], tuple[list[Record], RunSettings]], tmp_path: Path
) -> None:
    records, settings = make()

    overview_png(summarise(records, settings), records, tmp_path / "run.png")

    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_a_metric_s_name_is_neither_markup_nor_formula() -> None:
    plots = plot(*strange_metric())

    assert "$x_1$ &lt;b&gt;--&gt;日本" in texts(plots[METRIC].wide_svg)
    assert "<b>" not in plots[METRIC].wide_svg


def test_the_overview_is_a_png_of_1800_pixels(tmp_path: Path) -> None:
    path = tmp_path / "run.png"

    overview_png(summarise(RECORDS, SETTINGS), RECORDS, path)

    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1800, 1180)

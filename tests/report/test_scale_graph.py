"""The scale graph: what is on it, and that no simulation breaks it."""

import re
import struct

import matplotlib as mpl
import pytest

from tailbound.compute.simulate import Simulation, simulate
from tailbound.report.scale_graph import draw_scale_graph, headline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate("delay", [1, 16, 64], steps=100)


def words(svg: bytes) -> set[str]:
    """Text that is drawn: matplotlib notes it beside its shapes."""
    return set(re.findall("<!-- (.*?) -->", svg.decode()))


def test_axes_and_lines_are_named_with_their_units(simulation: Simulation) -> None:
    found = words(draw_scale_graph(simulation, "svg"))

    assert found >= {
        "throughput (micro-batches per second)",
        "share of linear scaling (%)",
        "workers",
        "linear scaling",
        "DropCompute",
        "baseline",
        "theory, from mean and variance",
    }
    assert found >= {"1", "16", "64"}


def test_the_headline_says_what_the_largest_job_gains(simulation: Simulation) -> None:
    point = simulation.points[2]
    dropped = f"{100 * point.dropped_share:.1f} % dropped"

    assert headline(simulation) == (
        f"Delay noise, 64 workers: {point.speedup:.2f} times the throughput, {dropped}"
    )
    assert headline(simulation) in words(draw_scale_graph(simulation, "svg"))


def test_the_headline_says_if_nothing_is_gained() -> None:
    one = simulate("gamma", [1], steps=10, stragglers="one_server")

    assert headline(one) == (
        "Gamma noise, stragglers on one server, 1 worker: no threshold gains anything"
    )


def test_a_png_is_1900_pixels_wide(simulation: Simulation) -> None:
    header = draw_scale_graph(simulation, "png")[:24]

    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1900, 880)


def test_lines_are_told_apart_without_colour(simulation: Simulation) -> None:
    """Dashes for linear scaling, dots for theory; in the colours of the report."""
    svg = draw_scale_graph(simulation, "svg").decode()

    assert {"#0072b2", "#d55e00"} <= set(re.findall("#[0-9a-f]{6}", svg))
    assert len(set(re.findall("stroke-dasharray: ([0-9.,]+)", svg))) >= 2


def test_the_same_simulation_gives_the_same_bytes_whatever_the_user_s_style(
    simulation: Simulation,
) -> None:
    svg, png = (
        draw_scale_graph(simulation, "svg"),
        draw_scale_graph(simulation, "png"),
    )

    with mpl.rc_context({"font.size": 30.0, "axes.grid": False}):
        assert draw_scale_graph(simulation, "svg") == svg
        assert draw_scale_graph(simulation, "png") == png
        assert mpl.rcParams["font.size"] == 30.0


def test_ticks_that_would_overlap_are_left_out() -> None:
    crowded = simulate("normal", [1001, 1002, 1003, 2], steps=1)

    found = words(draw_scale_graph(crowded, "svg"))

    assert found >= {"2", "1003"}
    assert not found & {"1001", "1002"}


@pytest.mark.parametrize("workers", [[1], [200], [2, 2], [64, 2]])
def test_few_or_disordered_points_are_drawn_without_a_warning(
    workers: list[int],
) -> None:
    simulation = simulate("bernoulli", workers, steps=3)

    assert len(draw_scale_graph(simulation, "png")) > 10_000

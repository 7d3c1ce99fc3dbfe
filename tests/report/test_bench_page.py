"""The benchmark's folder: page, plots, numbers."""

import json
import sys
from pathlib import Path

import pytest

from report import benches
from tailbound.errors import ConfigError, MissingExtraError
from tailbound.report.bench_outcome import BenchSummary
from tailbound.report.bench_page import write_bench


def page_of(folder: Path, summary: BenchSummary) -> str:
    return write_bench(folder, summary).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_folder_has_numbers_a_page_and_a_picture(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "bench"

    page = page_of(folder, benches.summary())

    assert sorted(path.name for path in folder.iterdir()) == [
        "bench.html",
        "cdf.png",
        "summary.json",
    ]
    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["ratio"] == {
        "p50": 0.25,
        "p95": 0.25,
        "p99": 0.25,
        "max": 0.25,
        "cpu": 1.5,
        "wire": 0.8,
    }
    assert (folder / "cdf.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<svg") == 4  # two plots, wide and narrow
    assert "tailbound, p95 119" in page
    assert "0.8 % / 40.8 %" in page.replace("&nbsp;", " ")


@pytest.mark.slow
def test_the_page_follows_the_theme_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(tmp_path, benches.summary())

    assert "prefers-color-scheme:dark" in page
    assert "var(--adaptive)" in page
    assert "var(--fixed)" in page
    assert "stroke-dasharray" in page  # the lines differ without colours too
    assert "src=" not in page
    assert "&lt;b&gt;" in page  # names are escaped
    assert "<b>" not in page


@pytest.mark.slow
def test_bursts_are_marked_where_there_were_any(tmp_path: Path) -> None:
    with_bursts = page_of(tmp_path, benches.summary())
    alone = page_of(tmp_path, benches.summary(is_alone=True, p_low=0.1, p_high=0.1))

    assert ">burst<" in with_bursts
    assert "over Gloo" in with_bursts
    assert "over Gloo" not in alone
    assert "Gloo, p95" not in alone


@pytest.mark.slow
def test_the_same_result_gives_the_same_page(tmp_path: Path) -> None:
    assert page_of(tmp_path, benches.summary()) == page_of(tmp_path, benches.summary())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot write .*/file/x: Not a directory"):
        write_bench(tmp_path / "file" / "x", benches.summary())


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tailbound.report.bench_plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)

    with pytest.raises(MissingExtraError, match=r"tailbound\[demo\]"):
        write_bench(tmp_path, benches.summary())

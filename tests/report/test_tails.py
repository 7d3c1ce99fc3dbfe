"""Four runs in numbers, words, rows and a page; the records are made by hand."""

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from report.slow_runs import look, one_run, slow_records, slow_settings
from report.synthetic import make_records, make_settings
from tailbound.errors import ConfigError
from tailbound.records import EpochReport, write_lines
from tailbound.report.build import build_report, draw_overview, read_run
from tailbound.report.summary import summarise
from tailbound.report.tails import TailSummary, summarise_tails
from tailbound.report.tails_page import make_tail_page
from tailbound.report.tails_plots import render_tail_plots
from tailbound.report.tails_table import make_outcome_table, tail_rows
from tailbound.report.tails_words import headline, sentences


@pytest.fixture(scope="module")
def summary() -> TailSummary:
    return summarise_tails(slow_records(), slow_settings())


def test_a_step_takes_as_long_as_its_slowest_rank(summary: TailSummary) -> None:
    # Steps 3 to 6: 0.25 s and, every other, 0.1 s more.
    assert summary.neither is not None
    assert summary.neither.steps == 4
    assert summary.neither.step_ms == 300.0
    assert summary.neither.step_std_ms == 50.0
    assert summary.neither.compute_ms == 250.0
    assert summary.compute is not None
    assert (summary.compute.step_ms, summary.compute.step_std_ms) == (200.0, 0.0)
    assert summary.both is not None
    assert summary.both.step_ms == 170.0


def test_the_ratios_are_over_the_run_with_neither_bound(summary: TailSummary) -> None:
    assert summary.ratio["compute"].step == 1.5
    assert summary.ratio["network"].step == pytest.approx(300 / 270, rel=1e-5)
    assert summary.ratio["both"].step == pytest.approx(300 / 170, rel=1e-5)
    assert summary.ratio["both"].train == 1.25
    # A spread of nothing has no ratio.
    assert summary.ratio["compute"].step_std is None
    assert summary.ratio["both"].metric_kept == pytest.approx(0.975 / 0.98, rel=1e-5)


def test_the_same_loss_is_timed_on_each_runs_own_steps(summary: TailSummary) -> None:
    # All losses fall alike, so each run needs its six steps: 1.8 s; 0.7 + 4 x 0.2 s.
    assert summary.neither is not None
    assert summary.compute is not None
    assert summary.neither.same_loss_s == pytest.approx(1.8)
    assert summary.compute.same_loss_s == pytest.approx(0.3 + 0.2 + 4 * 0.2)


def test_what_is_dropped_counts_where_a_threshold_was(summary: TailSummary) -> None:
    assert summary.compute is not None
    assert summary.compute.dropped_share == 0.125
    assert summary.compute.dropped_share_all == pytest.approx(4 / 48, rel=1e-5)
    assert summary.compute.overshoot_ms == 10.0
    assert summary.network is not None
    assert summary.network.dropped_share == 0.0


def test_the_first_look_predicts_and_the_last_one_knows(summary: TailSummary) -> None:
    assert summary.both is not None
    looks = summary.both.looks
    assert looks is not None
    assert (looks.predicted_step_ms, looks.realised_step_ms) == (210.0, 200.0)
    assert looks.dropped_share_W == (0.0, 0.25)
    assert summary.network is not None
    assert summary.network.looks is None


def test_the_outcome_is_told_in_words(summary: TailSummary) -> None:
    assert headline(summary) == (
        "With both bounds a step is 1.76× as fast, with one alone at most 1.50×"  # noqa: RUF001
    )
    said = sentences(summary)
    assert said[0] == (
        "Compute bound: a step takes 200 ms instead of 300 ms, with a standard "
        "deviation of 0.00 ms instead of 50.0 ms; 12.5 % of the micro-batches are "
        "dropped; the same loss is reached 1.38× as fast; 99.0 % of the metric is kept."  # noqa: RUF001
    )
    assert (
        "predicted, from the calibration, 210 ms a step at 10.0 % dropped" in said[-1]
    )
    assert "realised were 200 ms at 12.5 %" in said[-1]


def test_a_bound_that_does_not_add_up_is_told_so() -> None:
    records = [r for r in slow_records() if r.run != "both"]
    slower = [msgspec.structs.replace(r, run="both") for r in one_run("network")]

    told = headline(summarise_tails([*records, *slower], slow_settings()))

    assert told == (
        "With both bounds a step is 1.11× as fast; the better one alone gives 1.50×"  # noqa: RUF001
    )


def test_persistent_stragglers_and_replicas_that_differ_are_named() -> None:
    records = [
        msgspec.structs.replace(r, digest=f"{r.rank}")
        if isinstance(r, EpochReport)
        else r
        for r in slow_records()
    ]
    slow = msgspec.structs.replace(look("both", 6, 0.2), persistent_stragglers=(1,))

    said = sentences(summarise_tails([*records, slow], slow_settings()))

    assert said[-2] == "Slow all the time: rank 1; rebalance or replace it."
    assert said[-1].startswith("REPLICAS DIFFER")


def test_the_rows_are_the_same_measures_for_all_four(summary: TailSummary) -> None:
    rows = {row.label: row.cells for row in tail_rows(summary)}

    assert rows["step, mean"] == ("300 ms", "200 ms", "270 ms", "170 ms")
    assert rows["faster"] == ("1×", "1.50×", "1.11×", "1.76×")  # noqa: RUF001
    assert rows["threshold"][1] == "160 ms"
    assert rows["accuracy"] == ("0.9800", "0.9700", "0.9800", "0.9750")
    assert rows["replicas equal"] == ("yes",) * 4


def test_runs_that_are_not_there_leave_dashes() -> None:
    empty = summarise_tails([], slow_settings())

    assert headline(empty) == "Not all of the four runs left records"
    assert sentences(empty) == []
    assert {cell for row in tail_rows(empty) for cell in row.cells} == {"–"}  # noqa: RUF001
    assert len(render_tail_plots([])) == 5
    assert "Not all of the four runs" in make_tail_page(empty, [])


def test_the_table_is_printed_without_markup(summary: TailSummary) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(make_outcome_table(summary))
        text = console.export_text()

    assert "neither bound" in text
    assert "step, standard deviation" in text


def test_a_plain_summary_has_its_own_table() -> None:
    settings = make_settings(epochs=1)
    plain = summarise(make_records(settings), settings)

    assert make_outcome_table(plain)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "rounds.jsonl", slow_records())
    settings = slow_settings(task="<digits>")
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(settings))
    return tmp_path


@pytest.mark.slow
def test_a_folder_with_slow_workers_gets_a_page_of_its_own(folder: Path) -> None:
    page = build_report(folder).read_text(encoding="utf-8")

    assert "How long a step takes" in page
    assert page.count("<svg") == 10  # five plots in two widths
    assert "<digits>" not in page
    assert "&lt;digits&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/", "")
    told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert told["ratio"]["compute"]["step"] == 1.5
    assert told["both"]["looks"]["predicted_drop"] == 0.1
    assert build_report(folder).read_text(encoding="utf-8") == page


def test_one_picture_is_for_the_other_kind_of_run(folder: Path) -> None:
    outcome, records = read_run(folder)

    with pytest.raises(ConfigError, match=r"slow workers are in report\.html"):
        draw_overview(outcome, records, folder / "x.png")

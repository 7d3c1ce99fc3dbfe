"""The summary on a terminal."""

import io

from rich.console import Console

from report.synthetic import make_records, make_settings, one_epoch
from tailbound.records import Record
from tailbound.report.summary import RunSettings, summarise
from tailbound.report.table import make_table


def printed(records: list[Record], settings: RunSettings) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(make_table(summarise(records, settings)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_headline_table_and_verdict_fit_a_terminal() -> None:
    settings = make_settings()

    text = printed(make_records(settings), settings)

    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == (
        "Burst rounds were 4.4 times faster with the phase-aware loss bound"
    )
    assert "p = 0.8 % / 40.8 %" in text
    cells = [line.split() for line in lines if "burst round 76" in line]
    assert [" ".join(row) for row in cells] == [
        "burst round 76 14.9 ms 3.91 ms 3.82×"  # noqa: RUF001
    ]
    assert max(len(line) for line in lines) <= 100


def test_a_name_in_brackets_is_not_taken_for_markup() -> None:
    settings = make_settings(workers=1, epochs=1, burst_rounds=[])

    text = printed([one_epoch("fixed", 1, metric_name="[bold]f1[/]")], settings)

    assert "[bold]f1[/]" in text

"""A simulation on the terminal."""

import io

from rich.console import Console

from tailbound.compute.simulate import simulate
from tailbound.report.scale_table import make_scale_table


def test_each_number_of_workers_is_a_row_that_fits_into_80_columns() -> None:
    simulation = simulate("delay", [1, 16, 64], steps=30)
    console = Console(file=io.StringIO(), width=80)

    console.print(make_scale_table(simulation))

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith(
        "delay noise, 450 ms and 12 micro-batches, 500 ms of communication"
    )
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if line[:8].strip().isdecimal()]
    assert [row[0] for row in rows] == ["1", "16", "64"]
    assert rows[0][1:6] == ["1.00×", "–", "0", "%", "1.00×"]  # noqa: RUF001
    assert float(rows[2][-2]) > float(rows[2][-3])  # bounded does more than baseline

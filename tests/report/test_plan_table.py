"""A plan on the terminal."""

import io

from rich.console import Console

from report.plans import make_plan
from tailbound.compute.plans import Plan
from tailbound.report.plan_rows import size_rows, worker_rows
from tailbound.report.plan_table import make_plan_table


def printed(found: Plan) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(make_plan_table(found))
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_headline_table_and_sentences_fit_into_80_columns() -> None:
    found, _ = make_plan()

    lines = printed(found).splitlines()

    assert lines[0].startswith("DropCompute would get ")
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for size in ("6, 4", "3, 4", "12, 4", "24, 4", "6, 2", "6, 8"):
        assert f" {size} " in text
    assert "- In the trace (24 steps, 6 workers" in text


def test_a_worker_s_name_is_no_markup() -> None:
    found, _ = make_plan(name="[red]")

    assert "worker [red]" in printed(found)


def test_the_trace_is_the_first_row_and_stands_out() -> None:
    found, _ = make_plan()

    first, *rest = size_rows(found)

    assert first.is_main
    assert first.cells[0] == "6, 4"
    assert first.cells[-1] == f"{found.speedup:.2f}×"  # noqa: RUF001
    assert not any(row.is_main for row in rest)


def test_workers_come_slowest_first() -> None:
    found, _ = make_plan(stragglers=1)

    rows = worker_rows(found)

    assert [row.is_main for row in rows] == [True] + 5 * [False]
    assert rows[0].cells[0] == "w0"
    assert rows[0].cells[2].endswith("% of steps")
    means_s = [found.step_s_W[row.cells[0]] for row in rows]
    assert means_s == sorted(means_s, reverse=True)

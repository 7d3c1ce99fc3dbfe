"""The page about the wire protocol says what the code does."""

from pathlib import Path

import pytest

from tailbound.lab.protocol_page import PAGE, protocol_page, table, write_page

ROOT = Path(__file__).parents[2]


def test_the_page_in_the_checkout_is_the_generated_one() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")

    assert text == protocol_page(), (
        "docs/protocol.md is not what the code says; renew it with: python -c "
        "'from tailbound.lab import protocol_page as page; page.write_page()'"
    )


def test_the_page_is_renewed_in_place(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()

    write_page(tmp_path)

    assert (tmp_path / "docs" / "protocol.md").read_text("utf-8") == protocol_page()


@pytest.mark.parametrize(
    "line",
    [
        "| `CHECKING`  | For pings both ways, then start. |",
        "| `RUNNING`   | bye    | `CLOSED` |",
        "| `WAITING` | bitmap          | `SENDING` |",
        "    SENDING --> STOPPED: stop",
        "| `OPEN`   | within the bound | `CLOSED` |",
        "| 16   | 4     | sequence | Number of the chunk in its bucket, from 0. |",
        "| 1    | BACK | Mean, server to worker, exact. |",
        "| 2    | PING | Either way, while the link is checked. |",
        "| `origin`  | `str`             | Who found out: `rank 1`, `the server`. |",
        "| `direction` | `Direction` | |",
        "### Bye",
        "| `wire.MAX_FRAME_BYTES`            | 8388608      | A longer control message "
        "is malformed; bounds what a peer can make us hold. |",
    ],
)
def test_the_page_shows_tables_fields_and_limits(line: str) -> None:
    assert line in protocol_page().splitlines()


def test_a_table_is_padded_and_bars_in_cells_are_escaped() -> None:
    assert table(("a", "note"), [("`int | None`", "``x``"), ("b", "")]) == (
        "| a             | note |\n"
        "| ------------- | --- |\n"
        "| `int \\| None` | `x` |\n"
        "| b             | |\n"
    )

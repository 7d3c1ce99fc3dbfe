"""What every page is made of: its frame, plots, tables and tiles.

A page needs nothing from anywhere else and follows the reader's light or dark theme.
Every string that is shown is escaped here.
"""

import re
from collections.abc import Iterable, Iterator
from html import escape

from tailbound.report.palette import DARK, LIGHT, Palette
from tailbound.report.plots import Plot
from tailbound.report.style import STYLE


def document(title: str, body: Iterable[str], *, extra_style: str = "") -> str:
    """A whole HTML document; the same input gives the same text.

    Args:
        title: in plain text.
        body: lines of HTML.
        extra_style: rules that only this page needs.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title>",
        f"<style>{theme()}{STYLE}{extra_style}</style>",
        "</head>",
        "<body>",
        "<main>",
        *body,
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def theme() -> str:
    """The palettes as CSS variables, light and dark."""

    def variables(palette: Palette) -> str:
        return "".join(f"--{name}:{color};" for name, color in palette.markers())

    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    return f":root{{{variables(LIGHT)}}}{dark}"


def prose(text: str) -> str:
    """Escape a sentence, and keep each number on one line with its unit."""
    return re.sub(r"(?<=\d) (?=ms\b|s\b|%)", "&nbsp;", escape(text))


def tile(label: str, value: str, note: str) -> str:
    """One measure, large, and what is behind it."""
    return (
        f'<div class="tile"><span class="label">{label}</span>'
        f'<span class="ratio">{prose(value)}</span>'
        f'<span class="values">{prose(note)}</span></div>'
    )


def table(
    headings: Iterable[str], rows: Iterable[tuple[tuple[str, ...], bool]]
) -> Iterator[str]:
    """A table with names in its first column.

    Args:
        headings: of the columns.
        rows: their cells, and whether they are main ones.
    """
    yield '<div class="scroll"><table class="comparison"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    yield "</tr></thead><tbody>"
    for (first, *rest), is_main in rows:
        kind = ' class="main"' if is_main else ""
        cells = "".join(f"<td>{prose(cell)}</td>" for cell in rest)
        yield f'<tr{kind}><th scope="row">{prose(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def figure(plot: Plot) -> Iterator[str]:
    """One plot in both widths, with its caption."""
    yield "<section>"
    yield f"<h2>{escape(plot.title)}</h2>"
    yield "<figure>"
    yield f'<div class="plot wide">{plot.wide_svg}</div>'
    yield f'<div class="plot narrow">{plot.narrow_svg}</div>'
    yield f"<figcaption>{escape(plot.caption)}</figcaption>"
    yield "</figure>"
    yield "</section>"


def pairs_table(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Names and values; nothing if there are none."""
    if rows:
        yield f'<table class="pairs"><caption>{title}</caption><tbody>'
        for name, value in rows:
            yield (
                f'<tr><th scope="row">{escape(name)}</th><td>{prose(value)}</td></tr>'
            )
        yield "</tbody></table>"

"""A matplotlib SVG file becomes an element that follows the page's theme."""

import pytest

from tailbound.report.palette import THEMED
from tailbound.report.svg import adapt

FILE = f"""<?xml version="1.0"?>
<!DOCTYPE svg>
<svg width="9pt" height="9pt" viewBox="0 0 9 9" xmlns="http://www.w3.org/2000/svg">
 <metadata><rdf>made by</rdf></metadata>
 <defs><style type="text/css">*{{stroke-linejoin: round}}</style></defs>
 <!-- a comment -->
 <g id="axes_1" clip-path="url(#p1)"><use xlink:href="#m1" style="fill: {THEMED.ink}"/>
 <text style="FONT; fill: {THEMED.fixed}">ms</text></g>
</svg>
"""


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("font: 12px 'DejaVu Sans'", "font-size: 12px; font-weight: normal"),
        ("font: 700 12px 'DejaVu Sans'", "font-size: 12px; font-weight: 700"),
        ("font-size: 12px; font-family: 'DejaVu Sans'", "font-size: 12px"),
    ],
)
def test_colours_become_variables_and_fonts_and_ids_the_page_s(
    written: str, kept: str
) -> None:
    svg = adapt(FILE.replace("FONT", written), prefix="cdf", label="a < b")

    lines = [line.strip() for line in svg.splitlines() if line.strip()]
    assert lines == [
        '<svg viewBox="0 0 9 9" role="img" aria-label="a &lt; b">',
        "<defs></defs>",
        '<g id="cdf-axes_1" clip-path="url(#cdf-p1)">'
        '<use href="#cdf-m1" style="fill: var(--ink)"/>',
        f'<text style="{kept}; fill: var(--fixed)">ms</text></g>',
        "</svg>",
    ]

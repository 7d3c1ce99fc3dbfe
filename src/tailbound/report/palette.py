"""The colours of the report, light and dark; series from Okabe and Ito's palette.

Okabe-Ito colours stay apart for all common kinds of colour blindness. Fixed is
vermillion and adaptive is blue on light, orange and sky blue on dark: each keeps a
contrast of at least 3 to 1 to its background. Line styles and markers tell the two
runs apart without any colour.

Source: Okabe and Ito, Color Universal Design, 2008.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Palette:
    """A colour for each part of the page and of a plot."""

    page: str
    """Behind everything, and the halo around text on a plot."""
    ink: str
    """Text."""
    muted: str
    """Labels, ticks, captions."""
    rule: str
    """Grid lines and borders."""
    fixed: str
    adaptive: str
    critical: str
    """Shade of the steps under the critical bound."""

    def markers(self) -> Iterator[tuple[str, str]]:
        """Each part's name and colour."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


LIGHT = Palette(
    page="#ffffff",
    ink="#1b1f24",
    muted="#57606a",
    rule="#dfe3e8",
    fixed="#d55e00",
    adaptive="#0072b2",
    critical="#faf1b8",
)
DARK = Palette(
    page="#14181d",
    ink="#e8ebee",
    muted="#a3adb8",
    rule="#333b44",
    fixed="#e69f00",
    adaptive="#56b4e9",
    critical="#302e19",
)
THEMED = Palette(*(f"#fe01{index:02x}" for index in range(1, 8)))
"""Colours that stand for CSS variables until the SVG is written."""

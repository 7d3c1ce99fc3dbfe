"""Turn a matplotlib figure into inline SVG that follows the page's theme.

Figures are drawn in marker colours; here each becomes a CSS variable, so that the
page's style decides what it looks like in light and in dark. Text stays text, in the
page's font, and every id gets a prefix, so that many figures live on one page.
"""

import io
import re
from html import escape

from matplotlib import rc_context
from matplotlib.figure import Figure

from tailbound.report.palette import THEMED


def to_inline_svg(figure: Figure, *, prefix: str, label: str) -> str:
    """Render a figure drawn in :data:`~tailbound.report.palette.THEMED` colours.

    Args:
        figure: made at 72 dots per inch, so that one point is one CSS pixel.
        prefix: unique on the page; starts every id.
        label: what the figure shows, for those who cannot see it.

    Returns:
        An ``<svg>`` element without size of its own: it fills its container's width.
        The same figure gives the same text.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return adapt(buffer.getvalue(), prefix=prefix, label=label)


def adapt(text: str, *, prefix: str, label: str) -> str:
    """Make of a matplotlib SVG file an element for a page; see above.

    The font goes, so that text takes the page's. Releases before 3.11 write it as
    ``font: 700 12px 'Name'``, later ones as ``font-family: 'Name'``.
    """
    text = text[text.index("<svg") :]
    for noise in ("<metadata>.*?</metadata>", "<style.*?</style>", "<!--.*?-->"):
        text = re.sub(noise, "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(
        r"font: (?:(\d+|bold) )?([\d.]+px) [^;\"]*",
        lambda found: f"font-size: {found[2]}; font-weight: {found[1] or 'normal'}",
        text,
    )
    for variable, marker in THEMED.markers():
        text = text.replace(marker, f"var(--{variable})")
    view_box = re.search(r'viewBox="[^"]+"', text)
    assert view_box is not None
    opening = f'<svg {view_box[0]} role="img" aria-label="{escape(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1).strip()

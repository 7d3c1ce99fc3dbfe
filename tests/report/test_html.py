"""The page: complete, alone, escaped, and the verdict first."""

import re
from html.parser import HTMLParser

from report.synthetic import (
    make_records,
    make_settings,
    one_check,
    one_epoch,
    one_round,
)
from tailbound.records import Record
from tailbound.report.html import make_page
from tailbound.report.plots import Plot
from tailbound.report.summary import RunSettings, summarise

PLOT = Plot("Title & more", "Look <here>.", "<svg>wide</svg>", "<svg>narrow</svg>")
VOID = {"meta", "br", "hr", "link", "img"}


class Structure(HTMLParser):
    """Collects tags, and fails on one that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(records: list[Record], settings: RunSettings) -> str:
    return make_page(summarise(records, settings), records, [PLOT])


def words(page: str) -> str:
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)).replace("&nbsp;", " ")


def test_the_verdict_comes_before_the_table_and_the_table_before_the_plots() -> None:
    settings = make_settings()

    text = words(page_of(make_records(settings), settings))

    order = [
        "Burst rounds were 4.4 times faster",
        "4.42×",  # noqa: RUF001
        "A burst round took 16.7 ms on average",
        "Training took",
        "burst round 76 14.9 ms 3.91 ms 3.82×",  # noqa: RUF001
        "Title &amp; more",
        "Look &lt;here&gt;.",
        "background loss 2 %",
        "torch 2.13.0",
        "phase-aware run, 20 checks",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_every_element_is_closed_in_order() -> None:
    settings = make_settings()
    structure = Structure()

    structure.feed(page_of(make_records(settings), settings))

    assert structure.open == []
    assert structure.seen.count("h1") == 1


def test_the_page_needs_nothing_from_elsewhere_and_follows_theme_and_width() -> None:
    settings = make_settings()

    page = page_of(make_records(settings), settings)

    for reference in ("http:", "https:", "src=", "@import", "@font-face", "<script"):
        assert reference not in page
    assert "url(" not in page
    assert "@media (prefers-color-scheme:dark)" in page
    assert (
        '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    )


def test_the_same_input_gives_the_same_page() -> None:
    settings = make_settings()

    assert page_of(make_records(settings), settings) == page_of(
        make_records(settings), settings
    )


def test_strings_from_records_and_settings_are_escaped() -> None:
    evil = '<img src=x onerror="alert(1)">'
    settings = make_settings(
        task=evil, versions={evil: evil}, started=evil, mtu=evil, epochs=1
    )
    records: list[Record] = [
        one_epoch("fixed", 1, metric_name=evil),
        one_epoch("adaptive", 1, metric_name=evil),
        one_check("adaptive", 10, verdict=evil),
    ]

    page = page_of(records, settings)

    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;") >= 8


def test_each_decision_of_the_detector_has_a_line() -> None:
    records: list[Record] = [
        one_check("adaptive", 10, verdict="critical, 0.625 >= 0.5", ratio=0.625),
        one_check("adaptive", 10, rank=1),
        one_check("adaptive", 11, ratio=None),
        one_check("fixed", 10),
    ]

    page = page_of(records, make_settings())

    assert "phase-aware run, 1 check<" in page
    assert (
        "<tr><td>10</td><td>2.500</td><td>0.625</td>"
        "<td>critical, 0.625 &gt;= 0.5</td></tr>" in page
    )
    assert page.index("phase-aware run, 1") < page.index("fixed run, 1 check")


def test_a_run_that_ended_early_is_warned_of_and_has_no_empty_parts() -> None:
    page = page_of([one_round("fixed", 1)], make_settings(versions={}, burst_rounds=[]))

    text = words(page)
    assert "The fixed run ended early, at step 1, with 0 of 8 epochs done." in text
    assert "The phase-aware run left no records." in text
    assert "burst rounds none" in text
    assert "Versions" not in text
    assert "detector" not in text
    assert '<p class="verdict">' not in page
    assert '<div class="tiles">' not in page
    assert "<ul" not in page


def test_tiles_show_what_is_known_and_an_automatic_mtu_has_no_unit() -> None:
    settings = make_settings(workers=1, mtu="auto", burst_rounds=[1])
    records: list[Record] = [
        one_round("fixed", 1, latency_s=0.004),
        one_round("adaptive", 1, latency_s=0.002),
    ]

    text = words(page_of(records, settings))

    assert "burst round 2.00× 4.00 → 2.00 ms" in text  # noqa: RUF001
    assert "mean latency 2.00× 4.00 → 2.00 ms" in text  # noqa: RUF001
    assert text.count("training time") == 1  # in the table only
    assert "MTU auto" in text

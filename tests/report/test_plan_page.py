"""A plan's folder and its page."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report.plans import make_plan
from tailbound.errors import ConfigError
from tailbound.report.plan_page import make_plan_page, write_plan


class Reader(HTMLParser):
    """Collects a page's text, and checks that its elements nest."""

    VOID = frozenset({"meta", "path", "use", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value for name, value in attrs if name in ("src", "href") and value
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.slow
def test_a_folder_has_page_numbers_and_pictures(tmp_path: Path) -> None:
    found, latency_s_SWM = make_plan()

    page = write_plan(tmp_path / "a" / "b", found, latency_s_SWM, "trace.csv")

    assert page == tmp_path / "a" / "b" / "plan.html"
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "drops.png",
        "latencies.png",
        "plan.html",
        "plan.json",
        "threshold.png",
    ]
    told = json.loads((page.parent / "plan.json").read_text(encoding="utf-8"))
    assert told["speedup"] == found.speedup
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    read = Reader(text)
    assert {address for address in read.addresses if not address.startswith("#")} == (
        set()
    )


def test_the_page_tells_the_gain_the_price_and_what_to_write() -> None:
    found, _ = make_plan()

    read = Reader(make_plan_page(found, [], "trace.csv"))

    assert "DropCompute would get" in read.text
    assert "tailbound.ComputeBound(threshold_s=" in read.text
    for words in ("trace.csv", "6 workers", "limit 10 %", "not known, 0 s", "24, 4"):
        assert words in read.text.replace("\xa0", " ")
    assert read.open == []


def test_a_persistent_straggler_stands_out_and_nothing_is_to_be_pasted() -> None:
    found, _ = make_plan(stragglers=1)

    page = make_plan_page(found, [], "trace.csv")

    assert '<tr class="main"><th scope="row">w0</th>' in page
    assert "<pre>" not in page
    assert "Look at worker w0 first" in page


def test_many_workers_are_folded_away() -> None:
    few, _ = make_plan()
    many, _ = make_plan(workers=17)

    assert "<details open>" in make_plan_page(few, [], "t")
    assert "<details>" in make_plan_page(many, [], "t")


def test_names_from_files_are_escaped() -> None:
    found, _ = make_plan(name="<b>&")

    page = make_plan_page(found, [], "<i>.csv")

    assert make_plan_page(found, [], "<i>.csv") == page
    assert "<b>" not in page
    assert "<i>" not in page
    Reader(page)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found, latency_s_SWM = make_plan()

    with pytest.raises(ConfigError, match=r"cannot write .*file/out: Not a directory"):
        write_plan(tmp_path / "file" / "out", found, latency_s_SWM, "t")

"""The documents: links lead somewhere, citations resolve, examples stay short."""

import ast
import inspect
import re
from pathlib import Path

import msgspec
import pytest
import typer

import tailbound
from tailbound import cli
from tailbound.records import (
    EpochReport,
    RoundReport,
    StepReport,
    ThresholdReport,
)
from tailbound.report.bench_outcome import (
    BenchRatio,
    BenchRound,
    BenchSummary,
    BoundSummary,
    Checked,
    SideSummary,
    Turn,
)

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "design").glob("[0-9]*.md"))

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text(path)), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", text(document))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_python_block_of_a_document_parses(document: Path) -> None:
    for block in PYTHON.findall(text(document)):
        ast.parse(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_a_document_uses_public_names_only(document: Path) -> None:
    used = set(re.findall(r"\btailbound\.([A-Z]\w+)", text(document)))

    assert used <= set(tailbound.__all__)


def test_every_document_that_the_code_cites_exists() -> None:
    cited = {
        name for path in SOURCES for name in re.findall(r"docs/[\w/]+\.md", text(path))
    }

    assert [name for name in sorted(cited) if not (ROOT / name).exists()] == []


def test_every_decision_that_the_code_cites_has_a_page() -> None:
    numbers = {
        number
        for path in SOURCES
        for number in re.findall(r"docs/design/(\d{4})", text(path))
    }

    assert numbers
    assert numbers <= {page.name[:4] for page in DECISIONS}


def test_every_requirement_and_report_that_the_code_cites_is_explained() -> None:
    cited: set[str] = set()
    for path in SOURCES:
        for line in re.findall(r"(?:spec|FIELD) [^\n]*", text(path)):
            cited |= set(re.findall(r"\b(?:[NC]\d{1,2}|[SA]\d{2})\b", line))
    explained = text(ROOT / "docs" / "design" / "sources.md")

    assert cited
    assert [item for item in sorted(cited) if f"| {item} |" not in explained] == []


@pytest.mark.parametrize("page", DECISIONS, ids=relative)
def test_a_decision_is_one_page_with_its_four_parts(page: Path) -> None:
    lines = text(page).splitlines()

    assert lines[0].startswith(f"# {page.name[:4]} ")
    for part in ("**Question.", "**Choice.", "**What we gave up.", "**How we would no"):
        if page.name.startswith("0017") and part == "**Choice.":
            continue  # the whole page is the choice
        assert any(line.startswith(part) for line in lines), part
    assert len(lines) <= 75


def test_the_index_lists_every_decision_once() -> None:
    index = text(ROOT / "docs" / "design" / "README.md")
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", index)

    assert listed == [page.name for page in DECISIONS]


def test_the_report_s_page_explains_every_field_of_the_records() -> None:
    explained = set(re.findall(r"`(\w+)`", text(ROOT / "docs" / "guide" / "report.md")))
    fields = {
        field.name
        for record in (RoundReport, StepReport, ThresholdReport, EpochReport)
        for field in msgspec.structs.fields(record)
    }

    assert fields - explained == set()


def test_the_bench_s_page_explains_every_field_of_its_numbers() -> None:
    explained = set(re.findall(r"`(\w+)`", text(ROOT / "docs" / "guide" / "bench.md")))
    fields = {
        field.name
        for part in (
            BenchSummary,
            SideSummary,
            BoundSummary,
            BenchRatio,
            Checked,
            BenchRound,
            Turn,
        )
        for field in msgspec.structs.fields(part)
    }

    assert fields - explained == set()


def test_the_readme_lists_the_commands_that_there_are() -> None:
    listed = re.findall(r"^\| `tailbound (\w+)", text(ROOT / "README.md"), re.MULTILINE)
    commands = [
        command.name for command in typer.main.get_group(cli.app).commands.values()
    ]

    assert sorted(listed) == sorted(name for name in commands if name)


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    source = text(example)

    assert len(source.splitlines()) < 80
    assert example.name in inspect.cleandoc(ast.get_docstring(ast.parse(source)) or "")

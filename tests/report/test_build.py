"""A run folder becomes a report, or one clear line."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from report.synthetic import make_records, make_settings
from tailbound.errors import ConfigError, MissingExtraError
from tailbound.records import to_line, write_lines
from tailbound.report.build import build_report, read_run, write_whole
from tailbound.report.outcome import Summary

SETTINGS = make_settings(epochs=1, burst_rounds=[8])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(SETTINGS))
    write_lines(tmp_path / "rounds.jsonl", make_records(SETTINGS))
    return tmp_path


@pytest.mark.slow
def test_summary_and_page_are_written_beside_the_records(folder: Path) -> None:
    page = build_report(folder)

    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == 8
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["fixed"]["steps"] == 25
    assert summary["settings"]["task"] == "digits"
    assert sorted(path.name for path in folder.iterdir()) == [
        "report.html",
        "rounds.jsonl",
        "settings.json",
        "summary.json",
    ]


@pytest.mark.slow
def test_a_second_build_gives_the_same_files(folder: Path) -> None:
    first = build_report(folder).read_bytes()

    assert build_report(folder).read_bytes() == first


def test_a_last_line_cut_short_is_left_out(folder: Path) -> None:
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(to_line(make_records(SETTINGS)[0])[:-9])

    summary, records = read_run(folder)

    assert len(records) == len(make_records(SETTINGS))
    assert isinstance(summary, Summary)
    assert summary.fixed is not None


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_report(tmp_path / "gone")

    assert str(caught.value) == (
        f"{tmp_path / 'gone'} is not a folder; name the --out folder of a run"
    )


@pytest.mark.parametrize("name", ["rounds.jsonl", "settings.json"])
def test_a_file_that_is_not_there_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()

    with pytest.raises(ConfigError) as caught:
        build_report(folder)

    assert str(caught.value) == (
        f"cannot read {folder / name}: No such file or directory"
    )


def test_a_line_that_is_no_record_is_named_by_its_number(folder: Path) -> None:
    lines = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"kind": "mine"}\n'
    (folder / "rounds.jsonl").write_bytes(b"".join(lines))

    with pytest.raises(ConfigError, match=r"rounds\.jsonl:3: not a record: .*'mine'"):
        build_report(folder)


def test_a_file_that_cannot_be_written_is_named_and_leaves_no_draft(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.html"
    path.mkdir()

    with pytest.raises(ConfigError) as caught:
        write_whole(path, "text")

    assert str(caught.value) == f"cannot write {path}: Is a directory"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_folder_that_went_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "report.html"

    with pytest.raises(ConfigError) as caught:
        write_whole(path, "text")

    assert str(caught.value) == f"cannot write {path}: No such file or directory"


def forget_plots(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Make the next import of the plots fail for want of a package."""
    for name in list(sys.modules):
        if name.startswith("tailbound.report.") or name.split(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)


def test_without_matplotlib_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_plots(monkeypatch, "matplotlib")

    with pytest.raises(MissingExtraError) as caught:
        build_report(folder)

    assert str(caught.value) == (
        'report needs matplotlib; run: pip install "tailbound[demo]"'
    )


def test_another_missing_module_is_not_blamed_on_matplotlib(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_plots(monkeypatch, "tailbound.report.palette")

    with pytest.raises(ModuleNotFoundError, match=r"tailbound\.report\.palette"):
        build_report(folder)


def test_summary_and_table_need_no_matplotlib(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_plots(monkeypatch, "matplotlib")
    from tailbound.report.build import read_run as read_again
    from tailbound.report.tails_table import make_outcome_table

    summary, _ = read_again(folder)

    assert make_outcome_table(summary)

"""Build a run folder's report: records and settings in, summary and page out."""

import os
from pathlib import Path

from tailbound.errors import ConfigError, MissingExtraError
from tailbound.records import Record, read_lines
from tailbound.report.outcome import Summary
from tailbound.report.summary import read_settings, summarise

RECORDS = "rounds.jsonl"
SETTINGS = "settings.json"


def build_report(directory: Path) -> Path:
    """Read a run folder, and write ``summary.json`` and ``report.html`` into it.

    Each file appears whole or not at all: readers of an older one never see half of
    the new one.

    Args:
        directory: has ``rounds.jsonl`` and ``settings.json``.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder or one of its files is missing, cannot be read or
            written, or a line is no record.
        MissingExtraError: matplotlib is not installed.
    """
    summary, records = read_run(directory)
    try:
        from tailbound.report.html import make_page
        from tailbound.report.plots import render_plots
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise MissingExtraError(
            'report needs matplotlib; run: pip install "tailbound[demo]"'
        ) from error
    page = make_page(summary, records, render_plots(summary, records))
    write_whole(directory / "summary.json", summary.to_json())
    path = directory / "report.html"
    write_whole(path, page)
    return path


def read_run(directory: Path) -> tuple[Summary, list[Record]]:
    """Read a run folder and summarise it; needs no matplotlib.

    Raises:
        ConfigError: see :func:`build_report`.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a folder; name the --out folder of a run"
        )
    settings = read_settings(directory / SETTINGS)
    path = directory / RECORDS
    try:
        records = list(read_lines(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return summarise(records, settings), records


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it appears complete or not at all.

    Raises:
        ConfigError: the folder cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

"""Build a run folder's report: records and settings in, summary and page out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailbound.errors import ConfigError, MissingExtraError
from tailbound.records import Record, read_lines
from tailbound.report.outcome import Summary
from tailbound.report.summary import read_settings, summarise
from tailbound.report.tails import TailSummary, summarise_tails

RECORDS = "rounds.jsonl"
SETTINGS = "settings.json"

Outcome = Summary | TailSummary


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
    with needs_matplotlib("report needs"):
        from tailbound.report.html import make_page
        from tailbound.report.plots import render_plots
        from tailbound.report.tails_page import make_tail_page
        from tailbound.report.tails_plots import render_tail_plots
    if isinstance(summary, TailSummary):
        page = make_tail_page(summary, render_tail_plots(records))
    else:
        page = make_page(summary, records, render_plots(summary, records))
    write_whole(directory / "summary.json", summary.to_json())
    path = directory / "report.html"
    write_whole(path, page)
    return path


@contextmanager
def needs_matplotlib(who: str) -> Iterator[None]:
    """Import what draws in the ``with`` block.

    Args:
        who: and the verb, for the message.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise MissingExtraError(
            f'{who} matplotlib; run: pip install "tailbound[demo]"'
        ) from error


def draw_overview(outcome: Outcome, records: list[Record], path: Path) -> None:
    """Draw a run folder's plots into one picture.

    Raises:
        ConfigError: the runs are not those with a fixed and a phase-aware bound.
    """
    from tailbound.report.plots import overview_png

    if isinstance(outcome, TailSummary):
        raise ConfigError(
            "--png draws runs with a fixed and a phase-aware bound; the plots of runs "
            "with slow workers are in report.html"
        )
    overview_png(outcome, records, path)


def read_run(directory: Path) -> tuple[Outcome, list[Record]]:
    """Read a run folder and summarise it; needs no matplotlib.

    Returns:
        The summary, of two runs or, with slow workers, of four; and the records.

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
    if settings.stragglers is not None:
        return summarise_tails(records, settings), records
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

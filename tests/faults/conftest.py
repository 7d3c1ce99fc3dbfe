"""Prints what each fault led to, as a table, at the end of the run."""

from collections.abc import Callable, Iterator

import pytest

from faults.crew import Crew, Outcome, make_crew

ROWS = pytest.StashKey[list[Outcome]]()

Note = Callable[[str, str, float], None]


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Three hosts for a job."""
    with make_crew() as made:
        yield made


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Adds a line to the table: fault, outcome, seconds until it was clear."""

    def add(fault: str, outcome: str, seconds: float) -> None:
        rows = request.config.stash.setdefault(ROWS, [])
        rows.append(Outcome(fault, outcome, seconds))

    return add


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    width = max(len(row.fault) for row in rows)
    terminalreporter.section("faults")
    terminalreporter.line(f"{'fault':{width}}  seconds  outcome")
    for row in rows:
        terminalreporter.line(f"{row.fault:{width}}  {row.seconds:7.1f}  {row.outcome}")

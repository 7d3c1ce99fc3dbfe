"""Jobs that a script did not close, at its end."""

import os
import sys
from typing import Any

import pytest

from tailbound.errors import PeerLostError
from tailbound.training.exchange import LocalExchange
from tailbound.training.leaving import (
    close_open_jobs,
    describe,
    note_closed,
    note_open,
)


class Told(LocalExchange):
    """Keeps how it was left."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.left: list[str] = []
        self.failure = failure

    def close(self) -> None:
        self.left.append("closed")
        if self.failure is not None:
            raise self.failure

    def abort(self, reason: str) -> None:
        self.left.append(reason)


@pytest.fixture(autouse=True)
def no_error_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)


def test_an_open_job_is_closed_once() -> None:
    exchange = Told()
    note_open(exchange)

    close_open_jobs()
    close_open_jobs()

    assert exchange.left == ["closed"]


def test_a_job_that_was_left_is_not_closed_again() -> None:
    exchange = Told()
    note_open(exchange)
    note_closed(exchange)
    note_closed(exchange)

    close_open_jobs()

    assert exchange.left == []


def test_after_an_error_the_others_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Told()
    note_open(exchange)
    monkeypatch.setattr(sys, "last_value", KeyError("lr"), raising=False)

    close_open_jobs()

    assert exchange.left == ["KeyError: 'lr'"]


def test_a_goodbye_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Told(PeerLostError(("rank 1",), "the goodbye", "gone"))
    note_open(exchange)

    close_open_jobs()

    assert "did not end in good order: lost rank 1" in caplog.text


def test_a_forked_child_leaves_its_parents_job_alone() -> None:
    exchange = Told()
    note_open(exchange)

    child = os.fork()
    if child == 0:
        close_open_jobs()
        os._exit(len(exchange.left))
    _, status = os.waitpid(child, 0)
    note_closed(exchange)

    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such\n  file"), "ValueError: no such file"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_is_told_in_one_line(error: Any, line: str) -> None:
    assert describe(error) == line

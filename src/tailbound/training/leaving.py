"""Leave the jobs that a script did not close, when it ends.

Without this, the rank that hosts the server would take it along while others still
wait for their last mean.
"""

import atexit
import logging
import os
import sys
from typing import Protocol

from tailbound.errors import TailboundError

_log = logging.getLogger("tailbound")


class Leaver(Protocol):
    """What keeps this process in a job."""

    def close(self) -> None:
        """Say goodbye."""
        ...

    def abort(self, reason: str) -> None:
        """Leave because of an error and tell the others."""
        ...


_open: dict[Leaver, int] = {}
"""Those of jobs that are not closed, and the process that made each."""


def note_open(exchange: Leaver) -> None:
    """A job goes on through this exchange."""
    _open[exchange] = os.getpid()


def note_closed(exchange: Leaver) -> None:
    """A job was left, one way or the other."""
    _open.pop(exchange, None)


@atexit.register
def close_open_jobs() -> None:
    """Say goodbye for every open job, or tell why, if an error ended the script."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while _open:
        exchange, process = _open.popitem()
        if process != os.getpid():
            continue  # a forked child: the job is its parent's
        try:
            if error is None:
                exchange.close()
            else:
                exchange.abort(describe(error))
        except TailboundError as failure:
            _log.warning("the job did not end in good order: %s", failure)


def describe(error: BaseException) -> str:
    """One line for the other ranks, such as ``ValueError: no such file``."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

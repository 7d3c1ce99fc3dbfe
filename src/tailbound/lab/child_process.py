"""The far end of ``children``: answers leave as JSON lines; ends with its parent.

Orders come on standard input, whose end is the end of the process.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

_PR_SET_PDEATHSIG = 1


def take_stdout() -> Callable[[msgspec.Struct], None]:
    """Keep standard output for answers; what else prints goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return lambda answer: write_answer(answers, answer)


def write_answer(answers: BinaryIO, answer: msgspec.Struct) -> None:
    """Write one line to the launcher, at once."""
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


def die_with_parent() -> None:
    """Ask the kernel to end this process when the launcher is gone, even by kill -9.

    Ctrl-C reaches the whole terminal; ending the processes is the launcher's part.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    orders = select.poll()
    orders.register(sys.stdin, 0)
    if orders.poll(0):  # gone before we asked, or done: its end is closed
        sys.exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

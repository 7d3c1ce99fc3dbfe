"""The far end of a pipe to the launcher."""

import io
import subprocess
import sys

import pytest

from tailbound.lab.child_process import write_answer
from tailbound.lab.orders import Broken


def test_an_answer_is_a_line() -> None:
    out = io.BytesIO()

    write_answer(out, Broken("a\nb"))

    assert out.getvalue() == b'{"kind":"broken","message":"a\\nb"}\n'


@pytest.mark.processes
def test_standard_output_is_for_answers_only() -> None:
    code = (
        "from tailbound.lab.child_process import take_stdout\n"
        "from tailbound.lab.orders import Done\n"
        "print('before')\n"
        "say = take_stdout()\n"
        "print('noise', flush=True)\n"
        "say(Done())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30.0,
        check=True,
    )

    assert (done.stdout, done.stderr) == ('before\n{"kind":"done"}\n', "noise\n")

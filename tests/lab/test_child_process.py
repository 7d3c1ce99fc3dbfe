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


@pytest.mark.processes
@pytest.mark.parametrize(("is_gone", "told"), [(True, b""), (False, b"here\n")])
def test_who_starts_after_its_launcher_has_gone_ends(
    is_gone: bool, told: bytes
) -> None:
    code = (
        "from tailbound.lab.child_process import die_with_parent\n"
        "die_with_parent()\n"
        "print('here', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if is_gone:
            child.stdin.close()
        out = child.stdout.read()
        assert (out, child.wait(30.0)) == (told, 0)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()

"""Child processes that talk JSON lines: their answers, and how they end."""

import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from tailbound.errors import TailboundError
from tailbound.lab import children as module
from tailbound.lab.children import Child, Children
from tailbound.lab.orders import Answer, Broken, Done, Ready, decode_answer

pytestmark = pytest.mark.processes

READ_ALL = "import sys; sys.stdin.read()"


@pytest.fixture
def children() -> Iterator[Children[Answer]]:
    with Children(decode_answer) as started:
        yield started


def start(children: Children[Answer], code: str, name: str = "rank 0") -> Child[Answer]:
    return children.start(name, [sys.executable, "-c", code], env={})


def listen(children: Children[Answer], num: int) -> list[tuple[Child[Answer], Answer]]:
    """The next answers; gives up after ten seconds."""
    heard: list[tuple[Child[Answer], Answer]] = []
    deadline_s = time.monotonic() + 10.0
    while len(heard) < num and time.monotonic() < deadline_s:
        heard += children.listen(0.5)
    return heard


def listen_for_the_end(children: Children[Answer]) -> str:
    with pytest.raises(TailboundError) as caught:
        listen(children, 1)
    return str(caught.value)


def test_answers_come_in_order_and_whole() -> None:
    code = (
        "import sys, time\n"
        'print(\'{"kind": "ready"}\', flush=True)\n'
        "print('{\"kind\": \"bro', end='', flush=True)\n"
        "sys.stdin.readline()\n"
        'print(\'ken", "message": "no"}\', flush=True)\n'
        "sys.stdin.read()\n"
    )
    with Children(decode_answer) as children:
        child = start(children, code)
        first = listen(children, 1)
        child.tell(Done())
        second = listen(children, 1)

    assert first == [(child, Ready())]
    assert second == [(child, Broken("no"))]
    assert child.process.returncode == 0


def test_a_child_gets_our_environment_and_its_own(
    children: Children[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "a")
    code = (
        "import os, sys\n"
        "where = os.environ['OURS'] + os.environ['RANK']\n"
        'print(\'{"kind": "ready", "address": "\' + where + \'"}\', flush=True)\n'
        + READ_ALL
    )

    child = children.start("rank 3", [sys.executable, "-c", code], env={"RANK": "3"})

    assert listen(children, 1) == [(child, Ready("a3"))]


def test_an_order_is_one_json_line(children: Children[Answer]) -> None:
    code = (
        "import sys\n"
        "line = sys.stdin.readline().strip().replace('\"', \"'\")\n"
        'print(\'{"kind": "broken", "message": "\' + line + \'"}\', flush=True)\n'
        + READ_ALL
    )
    child = start(children, code)

    child.tell(Ready("10.0.0.1:5"))

    message = "{'kind':'ready','address':'10.0.0.1:5'}"
    assert listen(children, 1) == [(child, Broken(message))]


def test_what_is_no_answer_is_told_with_who_said_it(children: Children[Answer]) -> None:
    start(children, "print('hello', flush=True); " + READ_ALL)

    assert listen_for_the_end(children).startswith("rank 0 said what is no answer (")


def test_a_child_that_ends_is_told_with_its_last_error_line(
    children: Children[Answer],
) -> None:
    start(children, "import sys; sys.stderr.write('one\\ntwo\\n\\n'); sys.exit(3)")

    assert listen_for_the_end(children) == "rank 0 ended with exit code 3: two"


def test_a_child_that_ends_without_a_word_is_told_too(
    children: Children[Answer],
) -> None:
    start(children, "")

    assert listen_for_the_end(children) == "rank 0 ended with exit code 0"


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (
            signal.SIGKILL,
            "rank 0 was killed by signal 9 (SIGKILL); if nobody did that, memory ran "
            "out: see `dmesg`",
        ),
        (signal.SIGTERM, "rank 0 was killed by signal 15 (SIGTERM)"),
    ],
)
def test_a_killed_child_is_told_with_the_signal(
    children: Children[Answer], number: signal.Signals, told: str
) -> None:
    child = start(children, READ_ALL)
    child.process.send_signal(number)

    assert listen_for_the_end(children) == told
    assert children.find_killed() is child


def test_the_killed_one_is_the_cause_even_if_another_ended_first(
    children: Children[Answer],
) -> None:
    """A server that loses its worker ends too, and may be heard before it."""
    killed = start(children, READ_ALL, "rank 1")
    killed.process.kill()
    killed.process.wait()
    start(children, "import sys; sys.exit('lost rank 1')", "the server").process.wait()

    assert listen_for_the_end(children).startswith("rank 1 was killed by signal 9")


def test_nobody_was_killed_at_first(children: Children[Answer]) -> None:
    start(children, READ_ALL)

    assert children.find_killed(0.02) is None


def test_an_order_to_one_that_is_gone_says_how_it_went(
    children: Children[Answer],
) -> None:
    child = start(children, "import sys; sys.exit('no module named torch')")
    child.process.wait()

    with pytest.raises(TailboundError, match="exit code 1: no module named torch"):
        child.tell(Done())


def test_one_that_only_closes_its_output_is_not_called_dead(
    children: Children[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.1)
    start(children, f"import os; os.close(1); {READ_ALL}")

    told = listen_for_the_end(children)

    assert told == "rank 0 closed its standard output and still runs"


def test_none_outlives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends at SIGTERM, two ignore it and are killed, after one wait for both."""
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        'print(\'{"kind": "ready"}\', flush=True); time.sleep(60)'
    )
    deaf = 'import time; print(\'{"kind": "ready"}\', flush=True); time.sleep(60)'
    children = Children(decode_answer)
    started = [start(children, code) for code in (stubborn, stubborn, deaf)]
    listen(children, 3)
    ended_s = time.monotonic()

    children.__exit__(KeyError, KeyError("lr"), None)

    assert [child.process.returncode for child in started] == [-9, -9, -15]
    assert time.monotonic() - ended_s < 2.0


def test_a_flood_of_errors_keeps_the_last_lines_only() -> None:
    child = Child("rank 0", None, decode_answer)  # type: ignore[arg-type]

    for data in chain(repeat(b"noise\n", 100), [b"\xff the reason\n"]):
        child.take_error(data)

    assert list(child.stderr) == ["noise"] * 19 + ["� the reason"]

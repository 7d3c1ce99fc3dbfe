"""The demo's processes as a crew; other programs play them (``actors.py``)."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailbound.config import LossBound
from tailbound.errors import TailboundError
from tailbound.lab import crew as module
from tailbound.lab.children import Children
from tailbound.lab.crew import Crew, Progress, process_command
from tailbound.lab.orders import (
    Answer,
    Conditions,
    Role,
    ServerOrder,
    WorkerOrder,
    decode_answer,
)
from tailbound.records import EpochReport, RecordWriter, StepReport, read_lines

pytestmark = pytest.mark.processes

CONDITIONS = Conditions(rtt_ms=0, loss=0, burst=0, burst_rounds=(), mtu=1500, seed=0)


class Told(Progress):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ranks: list[int] = []
        self.digests: list[str] = []

    def begin(self, run: str, steps: int) -> None:
        self.begun.append((run, steps))

    def step(self, run: str, report: StepReport) -> None:
        self.ranks.append(report.rank)

    def epoch(self, run: str, report: EpochReport) -> None:
        self.ranks.append(report.rank)
        self.digests.append(report.digest)


@pytest.fixture
def children() -> Iterator[Children[Answer]]:
    started = Children(decode_answer)
    yield started
    started.__exit__(KeyError, KeyError(), None)  # as after an error: at once


@pytest.fixture
def write(tmp_path: Path) -> Iterator[RecordWriter]:
    with RecordWriter(tmp_path / "rounds.jsonl") as writer:
        yield writer


def make_crew(
    children: Children[Answer], workers: str = "good", server: str = "good"
) -> Crew:
    def command(role: Role) -> list[str]:
        part = server if role == "server" else workers
        return [sys.executable, str(Path(__file__).with_name("actors.py")), role, part]

    return Crew(children, 2, command=command)


def run(
    crew: Crew,
    write: RecordWriter,
    *,
    name: str = "fixed",
    timeout_s: float = 5.0,
    progress: Progress | None = None,
) -> None:
    crew.run(
        ServerOrder(run=name, world_size=2, timeout_s=timeout_s, conditions=CONDITIONS),
        WorkerOrder(
            run=name,
            task="digits",
            data=None,
            epochs=1,
            batch_size=8,
            bound=LossBound(),
            timeout_s=timeout_s,
            conditions=CONDITIONS,
        ),
        steps=3,
        write=write,
        progress=progress or Progress(),
    )


def test_every_ranks_records_are_kept_and_rank_0s_are_shown(
    children: Children[Answer], write: RecordWriter
) -> None:
    told = Told()
    crew = make_crew(children)
    crew.wait_ready()

    run(crew, write, progress=told)
    run(crew, write, name="adaptive", progress=told)

    kept = [(type(record), record.rank) for record in read_lines(write.path)]
    assert sorted(kept, key=str) == sorted(
        [(kind, rank) for kind in (StepReport, EpochReport) for rank in (0, 1)] * 2,
        key=str,
    )
    assert told.begun == [("fixed", 3), ("adaptive", 3)]
    assert set(told.ranks) == {0}
    assert told.digests == ["127.0.0.1:7000 2"] * 2


@pytest.mark.parametrize(
    ("workers", "server", "told"),
    [
        ("broken", "good", "^rank 1: lost the server$"),
        # Its address is known if the complaint did not come along with it.
        ("good", "broken", "^the server( at 127.0.0.1:7000)?: lost rank 1$"),
        ("dead", "good", "^rank 1 was killed by signal 9"),
    ],
)
def test_who_failed_and_how_is_told(
    children: Children[Answer],
    write: RecordWriter,
    workers: str,
    server: str,
    told: str,
) -> None:
    crew = make_crew(children, workers, server)
    crew.wait_ready()

    with pytest.raises(TailboundError, match=told):
        run(crew, write)


def test_a_server_that_dies_of_its_order_is_told(
    children: Children[Answer], write: RecordWriter
) -> None:
    crew = make_crew(children)
    crew.wait_ready()

    with pytest.raises(TailboundError, match="the server was killed by signal 9"):
        run(crew, write, name="deaf")


def test_a_standstill_ends_after_four_timeouts_and_names_who_is_due(
    children: Children[Answer], write: RecordWriter
) -> None:
    crew = make_crew(children, "stuck")
    crew.wait_ready()
    begun_s = time.monotonic()

    with pytest.raises(
        TailboundError, match="anything for 1 s, rank 0, rank 1 not finished"
    ):
        run(crew, write, timeout_s=0.25)

    assert time.monotonic() - begun_s > 1.0


def test_workers_that_never_get_ready_are_named(children: Children[Answer]) -> None:
    crew = make_crew(children, "silent")

    with pytest.raises(TailboundError, match="rank 0, rank 1 not finished"):
        crew.wait_ready(silence_s=0.3)


def test_the_processes_are_run_by_this_python() -> None:
    assert process_command("worker") == [
        sys.executable,
        "-m",
        "tailbound.lab.demo_process",
        "worker",
    ]


@pytest.mark.parametrize("known", [None, "/elsewhere"])
def test_the_processes_find_this_package_first(
    children: Children[Answer], monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if known:
        monkeypatch.setenv("PYTHONPATH", known)
    code = "import os, sys, tailbound; sys.exit(os.environ['PYTHONPATH'])"
    crew = Crew(children, 2, command=lambda role: [sys.executable, "-c", code])

    with pytest.raises(TailboundError) as caught:
        crew.wait_ready()

    source = str(Path(module.__file__).parents[2])
    assert str(caught.value).endswith(f"{source}:{known}" if known else source)

"""The demo's processes, a server and its workers: start them, train a run, listen."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tailbound.errors import TailboundError
from tailbound.lab.children import Child, Children
from tailbound.lab.orders import (
    Answer,
    Broken,
    Done,
    Ready,
    Role,
    ServerOrder,
    WorkerOrder,
)
from tailbound.records import EpochReport, Record, RecordWriter, StepReport

T = TypeVar("T", Ready, Done)

START_TIMEOUT_S = 60.0
"""Importing torch in several processes at once on two cores can take this long."""
LISTEN_S = 1.0


class Progress:
    """Told what happens; the command line shows it. Does nothing by itself."""

    def begin(self, run: str, steps: int) -> None:
        """A run starts."""

    def step(self, run: str, report: StepReport) -> None:
        """Rank 0 finished a step."""

    def epoch(self, run: str, report: EpochReport) -> None:
        """Rank 0 finished an epoch."""


def process_command(role: Role) -> list[str]:
    """How to start one of the demo's processes."""
    return [sys.executable, "-m", "tailbound.lab.demo_process", role]


class Crew:
    """One server and its workers, and where their records go.

    Args:
        children: starts and ends the processes.
        workers: how many.
        command: gives the command of a role; tests bring other programs.

    Every method raises TailboundError when a process fails, ends or falls silent.
    """

    def __init__(
        self,
        children: Children[Answer],
        workers: int,
        *,
        command: Callable[[Role], list[str]] = process_command,
    ) -> None:
        self._children = children
        self._early: list[tuple[Child[Answer], Ready | Done]] = []
        """Answers that came with one that was waited for, ahead of their time."""
        self._server = children.start("the server", command("server"), env={})
        self._workers = [
            children.start(
                f"rank {rank}",
                command("worker"),
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(workers),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(workers)
        ]

    def wait_ready(self, silence_s: float = START_TIMEOUT_S) -> None:
        """Wait until every worker has imported what it needs."""
        self._wait(self._workers, Ready, silence_s, _ignore)

    def run(
        self,
        order: ServerOrder,
        worker_order: WorkerOrder,
        *,
        steps: int,
        write: RecordWriter,
        progress: Progress,
    ) -> None:
        """Train one run to its end.

        Args:
            order: for the server.
            worker_order: for each worker; the server's address is filled in.
            steps: how many the run has.
            write: takes every record as it comes.
            progress: told when the server is there, and of rank 0's steps and epochs.
        """

        def take(record: Record) -> None:
            write(record)
            if record.rank == 0 and isinstance(record, StepReport):
                progress.step(record.run, record)
            elif record.rank == 0 and isinstance(record, EpochReport):
                progress.epoch(record.run, record)

        self._server.name = "the server"
        self._server.tell(order)
        ready = self._wait([self._server], Ready, START_TIMEOUT_S, take)[0]
        self._server.name = f"the server at {ready.address}"
        progress.begin(order.run, steps)
        worker_order = msgspec.structs.replace(worker_order, server=ready.address)
        for worker in self._workers:
            worker.tell(worker_order)
        # Each wait of a process has its own deadline; this one only ends a demo whose
        # processes all stand still.
        silence_s = 4 * order.timeout_s
        self._wait([*self._workers, self._server], Done, silence_s, take)

    def _wait(
        self,
        children: list[Child[Answer]],
        kind: type[T],
        silence_s: float,
        take: Callable[[Record], None],
    ) -> list[T]:
        """Wait for an answer of this kind from each; records are taken meanwhile."""
        early, self._early = self._early, []
        answers = {child: answer for child, answer in early if isinstance(answer, kind)}
        last_s = time.monotonic()
        while len(answers) < len(children):
            for child, answer in self._children.listen(min(LISTEN_S, silence_s)):
                last_s = time.monotonic()
                if isinstance(answer, kind):
                    answers[child] = answer
                elif isinstance(answer, Ready | Done):
                    self._early.append((child, answer))
                elif isinstance(answer, Broken):
                    raise self._children.find_cause(child, answer.message)
                else:
                    take(answer)
            if time.monotonic() - last_s > silence_s:
                due = ", ".join(c.name for c in children if c not in answers)
                raise TailboundError(
                    f"no process said anything for {silence_s:.0f} s, {due} not "
                    "finished; is this machine overloaded or was it asleep?"
                )
        return [answers[child] for child in children]


def _ignore(record: Record) -> None:
    """No run, no records."""

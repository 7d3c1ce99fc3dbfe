"""A job of three hosts that faults strike, and what comes of it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailbound.lab.hosts import Hosts, make_hosts, run

PROGRAM = str(Path(__file__).with_name("fault_rank.py"))
STORE_PORT = 29444
WORLD = 3
LIMIT_S = 50.0
"""Bounds a test that hangs."""


@dataclass
class Rank:
    """One process, and what it has said so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    error: str = ""
    ended_s: float = 0.0

    @property
    def steps(self) -> int:
        return sum(line.isdigit() for line in self.lines)

    @property
    def digest(self) -> str:
        """Of the parameters at the end."""
        assert self.process.returncode == 0, self.error
        return self.lines[-1]


@dataclass
class Outcome:
    """What a fault led to, a line of the table."""

    fault: str
    outcome: str
    seconds: float


class Crew:
    """Three ranks on three hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.ranks: list[Rank] = []
        self.struck_s = 0.0
        self._threads: list[threading.Thread] = []

    def start(
        self,
        *,
        steps: int = 100_000,
        wrap: dict[int, str] | None = None,
        changes: dict[int, dict[str, Any]] | None = None,
        **transport: Any,
    ) -> None:
        """Start the ranks.

        Args:
            steps: of the job; by default it goes on until something ends it.
            wrap: by rank, a shell command to run before it, on its host.
            changes: by rank, what its program is told besides.
            transport: settings; by default peers are waited for 8 s, UDP for 3 s.
        """
        transport = {"timeout_s": 8.0, "silence_s": 3.0} | transport
        for rank in range(WORLD):
            told = {"steps": steps, "transport": transport} | (changes or {}).get(
                rank, {}
            )
            command = [sys.executable, PROGRAM, json.dumps(told)]
            before = (wrap or {}).get(rank)
            if before is not None:
                command = ["sh", "-c", f'{before} && exec "$@"', "sh", *command]
            process = subprocess.Popen(
                self.hosts.command(rank, *command),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "WORLD_SIZE": str(WORLD),
                    "RANK": str(rank),
                    "MASTER_ADDR": self.hosts.address(0),
                    "MASTER_PORT": str(STORE_PORT),
                },
            )
            self.ranks.append(Rank(process))
        for one in self.ranks:
            for listen in (_listen, _listen_to_errors):
                thread = threading.Thread(target=listen, args=(one,))
                thread.start()
                self._threads.append(thread)

    def await_step(self, step: int) -> None:
        """Wait until every rank has done a step."""
        deadline_s = time.monotonic() + LIMIT_S
        while any(one.steps < step for one in self.ranks):
            errors = [one.error for one in self.ranks if one.error]
            assert not errors, errors
            assert time.monotonic() < deadline_s, [one.steps for one in self.ranks]
            time.sleep(0.02)

    def strike(self) -> None:
        """The fault happens now; what it leads to is timed from here."""
        self.struck_s = time.monotonic()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.ranks[rank].process.send_signal(number)

    def nft(self, rank: int, rule: str) -> None:
        """Add a rule for what arrives at a host."""
        table = (
            "table inet fault {\n chain arriving {\n  type filter hook input "
            f'priority 0;\n  iifname "lo" accept\n  {rule}\n }}\n}}\n'
        )
        run(*self.hosts.command(rank, "nft", "-f", "-"), stdin=table)

    def mend(self, rank: int) -> None:
        """Take the rules away."""
        run(*self.hosts.command(rank, "nft", "delete", "table", "inet", "fault"))

    def ip(self, rank: int, *words: str) -> None:
        """Run ``ip`` on a host."""
        run("ip", "-n", self.hosts.names[rank], *words)

    def wait(self, *ranks: int) -> float:
        """Wait until ranks have ended; the seconds since the fault struck.

        Args:
            ranks: which; all, if none are named.
        """
        chosen = [self.ranks[rank] for rank in ranks] or self.ranks
        for one in chosen:
            one.process.wait(LIMIT_S)
        for thread in self._threads:
            thread.join(0 if ranks else LIMIT_S)
        return max(one.ended_s or time.monotonic() for one in chosen) - self.struck_s

    def end(self) -> None:
        """End what is left, however the test went."""
        for one in self.ranks:
            one.process.kill()
            one.process.wait()
        for thread in self._threads:
            thread.join()
        for one in self.ranks:
            for stream in (one.process.stdout, one.process.stderr):
                assert stream is not None
                stream.close()


def _listen(rank: Rank) -> None:
    assert rank.process.stdout is not None
    for line in rank.process.stdout:
        rank.lines.append(line.strip())


def _listen_to_errors(rank: Rank) -> None:
    assert rank.process.stderr is not None
    rank.error = rank.process.stderr.read().strip()
    rank.ended_s = time.monotonic()


@contextmanager
def make_crew() -> Iterator[Crew]:
    """Three hosts, nothing running yet; all of it is gone afterwards."""
    with make_hosts(WORLD) as hosts:
        crew = Crew(hosts)
        try:
            yield crew
        finally:
            crew.end()

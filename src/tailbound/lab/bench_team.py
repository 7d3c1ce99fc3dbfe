"""The benchmark's ranks as a team: one order to all, one answer from each."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from tailbound.config import LossBound, Plan
from tailbound.errors import TailboundError
from tailbound.lab.bench_orders import (
    BenchAnswer,
    Finished,
    Host,
    Join,
    Listening,
    Order,
    Settled,
    Side,
    decode_bench_answer,
)
from tailbound.lab.children import Child, Children
from tailbound.lab.hosts import Hosts
from tailbound.lab.orders import Broken, Ready

A = TypeVar("A", Listening, Ready, Finished, Settled)

IMPORT_TIMEOUT_S = 60.0
"""Importing torch in several processes at once on two cores can take this long."""
LISTEN_S = 1.0
CARD, LOOPBACK = "eth0", "lo"


class Team:
    """The ranks' processes; none outlives the ``with`` block.

    Every method raises TailboundError when a rank fails, ends or falls silent.

    Args:
        world_size: ranks.
        timeout_s: how long a rank may take to reduce, and to find the others.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._world_size = world_size
        self._children: Children[BenchAnswer] = Children(decode_bench_answer)
        self._ranks: list[Child[BenchAnswer]] = []
        self._hosts: Hosts | None = None

    def start(self, command: Sequence[str], hosts: Hosts | None) -> None:
        """Start a process for each rank, on a host of its own if there are hosts."""
        self._hosts = hosts
        variables = {
            "OMP_NUM_THREADS": "1",  # the ranks share this machine's cores
            "GLOO_SOCKET_IFNAME": CARD if hosts else LOOPBACK,
        }
        for rank in range(self._world_size):
            line = hosts.command(rank, *command) if hosts else list(command)
            self._ranks.append(
                self._children.start(f"rank {rank}", line, env=variables)
            )

    def join(
        self,
        *,
        num_elements: int,
        sides: tuple[Side, ...],
        plan: Plan,
        bound: LossBound,
        seed: int,
    ) -> None:
        """Let the ranks meet, at a store of rank 0's; see ``Join``."""
        host = self._hosts.address(0) if self._hosts else "127.0.0.1"
        first = self._ranks[0]
        first.tell(Host(host, self._timeout_s))
        (there,) = self._gather([first], Listening, IMPORT_TIMEOUT_S)
        for rank, child in enumerate(self._ranks):
            order = Join(
                rank=rank,
                world_size=self._world_size,
                host=host,
                store_port=there.port,
                device=CARD if self._hosts else LOOPBACK,
                num_elements=num_elements,
                sides=sides,
                plan=plan,
                bound=bound,
                seed=seed,
                timeout_s=self._timeout_s,
            )
            child.tell(order)
        # The ranks' own deadlines are shorter, and name who did not come.
        self._gather(self._ranks, Ready, IMPORT_TIMEOUT_S + 4 * self._timeout_s)

    def ask(self, order: Order, kind: type[A]) -> list[A]:
        """Give all ranks an order, and wait for the answer of each, in rank order."""
        self.tell(order)
        return self.gather(kind)

    def tell(self, order: Order) -> None:
        """Give all ranks an order."""
        for child in self._ranks:
            child.tell(order)

    def gather(self, kind: type[A]) -> list[A]:
        """Wait for an answer of this kind from each rank, in rank order."""
        return self._gather(self._ranks, kind, 4 * self._timeout_s)

    def _gather(
        self, children: list[Child[BenchAnswer]], kind: type[A], timeout_s: float
    ) -> list[A]:
        answers: dict[str, A] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(answers) < len(children):
            for child, answer in self._children.listen(min(LISTEN_S, timeout_s)):
                if isinstance(answer, Broken):
                    raise self._children.find_cause(child, answer.message)
                if not isinstance(answer, kind):
                    raise TailboundError(f"{child.name} answered {answer} to an order")
                answers[child.name] = answer
            if time.monotonic() > deadline_s:
                due = ", ".join(c.name for c in children if c.name not in answers)
                raise TailboundError(
                    f"{due} said nothing for {timeout_s:.0f} s; is this machine "
                    "overloaded or was it asleep?"
                )
        return [answers[child.name] for child in children]

    def __enter__(self) -> "Team":
        self._children.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._children.__exit__(kind, error, trace)

"""Run whole jobs over real sockets in one test: a server and W workers as threads.

Ranks as processes, for tests that kill one, are in ``tests/rank_process.py``.
"""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.config import LossBound, Transport
from tailbound.protocol.messages import BucketSpec
from tailbound.transport.driver import Driver
from tailbound.transport.group import Group, Server

LIMIT_S = 40.0
"""Bounds a test that hangs; far above what any takes on a busy machine."""
QUICK = Transport(mtu=1500, timeout_s=20.0)

Work = Callable[[Group], Any]


def vector(num: int, dtype: str = "float32") -> tuple[BucketSpec, ...]:
    """One bucket of one flat tensor."""
    return (BucketSpec(dtype, ("w",), ((num,),)),)


def reduced(group: Group, num: int, value: float, weight: float = 1.0) -> Any:
    """One all-reduce of a constant float32 vector; the mean."""
    values = np.full(num, value, np.float32)
    group.all_reduce(values, weight)
    return values


@dataclass
class Job:
    """What came out of a job, by rank."""

    results: list[Any]
    errors: list[BaseException | None]
    server: Server
    server_error: BaseException | None = None
    ended_s: list[float] = field(default_factory=list)
    """When each worker was through, on the monotonic clock."""

    def check(self) -> list[Any]:
        """The results, if nothing failed."""
        for error in (*self.errors, self.server_error):
            if error is not None:
                raise error
        return self.results


def run_job(
    works: list[Work],
    *,
    buckets: tuple[BucketSpec, ...] | list[tuple[BucketSpec, ...]],
    bound: LossBound | None = None,
    transport: Transport | list[Transport] = QUICK,
    server_transport: Transport | None = None,
    server: Server | None = None,
) -> Job:
    """Run one server and a worker for each of ``works``, all in threads.

    Args:
        works: what each rank does with its group; the group is closed afterwards.
        buckets: what they reduce; per rank if it is a list.
        bound: exact if None.
        transport: of the workers; per rank if it is a list.
        server_transport: of the server; the workers' first if None.
        server: one that listens already.
    """
    num = len(works)
    transports = transport if isinstance(transport, list) else [transport] * num
    buckets_W = buckets if isinstance(buckets, list) else [buckets] * num
    if server is None:
        server = Server(num, transport=server_transport or transports[0])
    job = Job([None] * num, [None] * num, server, None, [0.0] * num)

    def serve() -> None:
        try:
            job.server.run()
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            job.server_error = error

    def work(rank: int) -> None:
        try:
            group = Group(
                job.server.address,
                rank=rank,
                world_size=num,
                buckets=buckets_W[rank],
                bound=bound or LossBound.fixed(0.0),
                transport=transports[rank],
            )
            with contextlib.closing(group):
                job.results[rank] = works[rank](group)
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            job.errors[rank] = error
        job.ended_s[rank] = time.monotonic()

    threads = [threading.Thread(target=serve, daemon=True, name="test-server")]
    threads += [
        threading.Thread(target=work, args=(rank,), daemon=True, name=f"test-{rank}")
        for rank in range(num)
    ]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} hangs"
    return job


@contextlib.contextmanager
def driven(server: Server) -> Iterator[Driver]:
    """Turn a server in a driver of the test's own, which takes ``call``."""
    driver = Driver()
    driver.add(server.station)
    driver.start()
    try:
        yield driver
    finally:
        driver.stop(5.0)


def open_fds() -> dict[int, str]:
    """Open file descriptors of this process and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/self/fd/{name}").readlink())
            if "/proc/" not in target:
                found[int(name)] = target
    return found


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Assert that no thread and no socket of the library outlives the block."""
    gc.collect()
    before = open_fds()
    yield
    threads = [t.name for t in threading.enumerate() if t.name.startswith("tailbound")]
    assert threads == []
    after = open_fds()
    extra = {fd: what for fd, what in after.items() if before.get(fd) != what}
    assert extra == {}


def free_ports(num: int) -> tuple[int, int]:
    """First and last of ports in a row that are free now, for TCP and UDP."""
    start = 21_000 + os.getpid() * 40 % 8_000  # two runs at once seldom meet
    for first in range(start, 30_000, num):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + num):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    opened = stack.enter_context(socket.socket(type=kind))
                    opened.bind(("127.0.0.1", port))
            return first, first + num - 1
    raise AssertionError("no free ports")

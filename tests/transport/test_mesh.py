"""Whole meshes over real sockets on loopback, one thread per rank."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tailbound.config import LossBound, Transport
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    JobClosedError,
    PeerLostError,
    RemoteError,
    RoundTimeoutError,
    TailboundError,
    UnreachableError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import Reduced
from tailbound.transport.mesh import Answer, Meeting, MeshGroup

pytestmark = pytest.mark.sockets

EXACT = LossBound.fixed(0.0)
QUICK = Transport(mtu=1500, timeout_s=20.0)
NUM = 20_000
LIMIT_S = 40.0


@dataclass
class Place:
    """Where the ranks of one test meet."""

    world_size: int
    addresses: dict[int, str] = field(default_factory=dict)
    is_full: threading.Event = field(default_factory=threading.Event)

    def meet(self, rank: int) -> Callable[[str], Meeting]:
        def wait(address: str) -> Meeting:
            self.addresses[rank] = address
            if len(self.addresses) == self.world_size:
                self.is_full.set()
            assert self.is_full.wait(LIMIT_S)
            ordered = tuple(self.addresses[r] for r in range(self.world_size))
            return Meeting(77, ordered)

        return wait


def run_mesh(
    work: Callable[[MeshGroup], Any],
    world_size: int = 2,
    bound: LossBound = EXACT,
    transport: Transport | list[Transport] = QUICK,
    host: str = "127.0.0.1",
) -> list[Any]:
    """What ``work`` returned or raised on every rank; settings may be per rank."""
    place = Place(world_size)
    transports = transport if isinstance(transport, list) else [transport] * world_size

    def run(rank: int) -> Any:
        try:
            mesh = MeshGroup(
                rank,
                world_size,
                bound,
                transports[rank],
                host=host,
                meet=place.meet(rank),
            )
        except (TailboundError, ConfigError) as error:
            return error
        with contextlib.closing(mesh):
            try:
                return work(mesh)
            except (TailboundError, ConfigError) as error:
                return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size), timeout=LIMIT_S))


@contextlib.contextmanager
def two_ranks(transport: Transport = QUICK) -> Iterator[tuple[MeshGroup, MeshGroup]]:
    place = Place(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: MeshGroup(
                rank, 2, EXACT, transport, host="127.0.0.1", meet=place.meet(rank)
            ),
            range(2),
            timeout=LIMIT_S,
        )
    try:
        yield first, second
    finally:
        first.abort("the test is over")
        second.abort("the test is over")


def start(mesh: MeshGroup, values: Any, done: Any, **options: Any) -> None:
    mesh.start(
        values,
        **{
            "dtype": "float32",
            "weight": 1.0,
            "step": 1,
            "is_last": True,
            "on_done": done,
            **options,
        },
    )


# -- means -------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_mean_is_exact_on_every_rank(host: str) -> None:
    def work(mesh: MeshGroup) -> list[float]:
        means = []
        for turn in range(3):
            values = np.full(NUM, mesh.rank + turn, np.float32)
            mesh.all_reduce(values, 1.0)
            means.append(float(np.unique(values).item()))
        return means

    assert run_mesh(work, 3, host=host) == [[1.0, 2.0, 3.0]] * 3


def test_replicas_are_alike_when_chunks_are_given_up() -> None:
    lossy = Transport(
        mtu=1500,
        timeout_s=20.0,
        impairments=Impairments(losses=(IndependentLoss(rate=0.3),), delay_s=0.001),
    )

    def work(mesh: MeshGroup) -> tuple[bytes, int]:
        values = np.full(NUM, 2.0**mesh.rank, np.float32)
        event = mesh.all_reduce(values, 1.0)
        return values.tobytes(), event.reports[0].missing

    results = run_mesh(work, 3, LossBound.fixed(0.408), lossy)

    assert len({mean for mean, _ in results}) == 1
    assert all(0 < missing <= 16 for _, missing in results)  # of 38 chunks, or 37


def test_several_buckets_may_be_under_way() -> None:
    def work(mesh: MeshGroup) -> list[tuple[int, float]]:
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        buckets = [np.full(NUM, mesh.rank * slot, np.float32) for slot in range(4)]
        for slot, values in enumerate(buckets):
            start(mesh, values, done.put, is_last=slot == 3)
        events = [done.get(timeout=LIMIT_S) for _ in buckets]
        return sorted(
            (event.bucket, float(buckets[event.bucket][0]))
            for event in events
            if isinstance(event, Reduced)
        )

    assert run_mesh(work) == [[(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]] * 2


def test_bytes_are_gathered_and_datagrams_counted() -> None:
    def work(mesh: MeshGroup) -> tuple[Any, ...]:
        parts = mesh.all_gather(bytes([mesh.rank]))
        mesh.all_reduce(np.ones(NUM, np.float32), 1.0)
        statistics = mesh.udp_statistics()
        return parts, statistics.datagrams_sent > 50, mesh.counters().accepted > 50

    assert run_mesh(work, 3) == [((b"\0", b"\1", b"\2"), True, True)] * 3


# -- what goes wrong ---------------------------------------------------------------


def test_a_mesh_has_two_ranks_or_more() -> None:
    place = Place(1)

    with pytest.raises(ConfigError, match="2 or more ranks, not 0 of 1"):
        MeshGroup(0, 1, EXACT, QUICK, host="127.0.0.1", meet=place.meet(0))


def test_a_meeting_that_fails_leaves_no_socket_open() -> None:
    def nobody(_: str) -> Meeting:
        raise PeerLostError(("rank 1",), "start-up", "it did not come")

    with pytest.raises(PeerLostError, match="rank 1"):
        MeshGroup(0, 2, EXACT, QUICK, host="127.0.0.1", meet=nobody)


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    def meet(address: str) -> Meeting:
        return Meeting(77, ("127.0.0.1:9", address))

    hasty = Transport(mtu=1500, timeout_s=0.3)
    with pytest.raises(UnreachableError, match="rank 0"):
        MeshGroup(1, 2, EXACT, hasty, host="127.0.0.1", meet=meet)


def test_ranks_that_differ_get_both_values() -> None:
    def work(mesh: MeshGroup) -> Any:
        mesh.all_reduce(np.ones(NUM + mesh.rank, np.float32), 1.0)

    errors = run_mesh(work)

    assert any(isinstance(error, HandshakeError) for error in errors)
    assert all("20000" in str(error) and "20001" in str(error) for error in errors)


def test_a_wrong_call_is_answered_and_ends_nothing() -> None:
    def work(mesh: MeshGroup) -> tuple[str, float]:
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        start(mesh, np.ones(4, np.float32), done.put, loss_scale=0.0)
        error = done.get(timeout=LIMIT_S)
        values = np.full(4, mesh.rank, np.float32)
        mesh.all_reduce(values, 1.0)
        return type(error).__name__, float(values[0])

    assert run_mesh(work) == [("ConfigError", 0.5)] * 2


def test_a_rank_that_ends_is_named_and_every_promise_is_kept() -> None:
    with two_ranks() as (first, second):
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        for slot in range(3):
            start(first, np.ones(NUM, np.float32), done.put, is_last=slot == 2)

        second.abort("out of memory")

        errors = [done.get(timeout=LIMIT_S) for _ in range(3)]
        assert all("out of memory" in str(error) for error in errors)
        with pytest.raises(RemoteError, match="out of memory"):
            start(first, np.ones(NUM, np.float32), done.put, step=2)


def test_what_is_under_way_at_the_end_is_answered() -> None:
    with two_ranks() as (first, _):
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        start(first, np.ones(NUM, np.float32), done.put)

        first.abort("enough")

        assert "enough" in str(done.get(timeout=LIMIT_S))
        with pytest.raises(RemoteError, match="enough"):
            first.all_gather(b"")


def test_a_rank_that_does_not_come_to_the_round_is_named() -> None:
    hasty = Transport(mtu=1500, timeout_s=0.5)
    with (
        two_ranks(hasty) as (first, _),
        pytest.raises(RoundTimeoutError, match="rank 1"),
    ):
        first.all_reduce(np.ones(NUM, np.float32), 1.0)


def test_who_was_told_of_a_failure_may_close_at_once() -> None:
    """Even before the driver has turned: closing does not raise the error again."""
    closed: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def close(mesh: MeshGroup) -> None:
        try:
            mesh.close()
        except TailboundError as error:
            closed.put(error)
        else:
            closed.put(None)

    def work(mesh: MeshGroup) -> Answer:
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()

        def told(answer: Answer) -> None:
            done.put(answer)
            if mesh.rank == 0:
                closer = threading.Thread(target=close, args=(mesh,))
                closer.start()
                closer.join(0.05)  # the driver stands still meanwhile

        if mesh.rank == 0:
            mesh.all_gather(b"")  # rank 1's announcement came before this
        start(mesh, np.zeros(NUM, np.float32), told, step=7 + mesh.rank)
        if mesh.rank == 1:
            mesh.all_gather(b"")
        return done.get(timeout=LIMIT_S)

    first, _ = run_mesh(work)

    assert isinstance(first, HandshakeError)
    assert closed.get(timeout=LIMIT_S) is None


def test_closing_twice_is_fine() -> None:
    def work(mesh: MeshGroup) -> None:
        mesh.close()
        mesh.close()
        mesh.abort("too late")
        with pytest.raises(JobClosedError):
            mesh.all_gather(b"")

    assert run_mesh(work) == [None, None]

"""A whole server-plan job in memory: endpoints, bad links, a clock that jumps.

No socket and no sleep: time moves to whatever is due next. Everything follows from the
seed, so a failing run is replayed by its seed.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.impairments import Impairments
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import (
    Ended,
    Event,
    Failed,
    Gathered,
    Reduced,
    Started,
)
from tailbound.protocol.link import Link
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.wire import BucketSpec
from tailbound.protocol.worker import LINK, WorkerEndpoint
from tailbound.testing.impaired_path import Batch, ImpairedPath

E = TypeVar("E", Started, Reduced, Gathered, Ended)
T = TypeVar("T")

BATCH_BYTES = 65535
MAX_SEGMENTS = 64
MAX_IDLE_TURNS = 8
"""Turns in a row in which nothing moves, the clock included: a machine whose timer is
due has nothing to do then, and a real driver would spin at full CPU."""


@dataclass(slots=True, eq=False)
class Station:
    """One endpoint and the paths that lead to it, one per link."""

    endpoint: Endpoint
    paths: dict[int, ImpairedPath]
    events: deque[Event] = field(default_factory=deque)
    cut: set[int] = field(default_factory=set)
    """Links whose datagrams towards this endpoint vanish; control still passes."""
    is_dead: bool = False
    """Its process is gone."""


class FakeNet:
    """A server and its workers over impaired links.

    Args:
        world_size: workers.
        buckets: what they reduce; per worker if it is a list.
        bound: their loss bound; per worker if it is a list.
        to_server: what happens to what the server receives.
        to_worker: what happens to what the workers receive.
        seed: of every draw.
        mtu: bytes of an IP packet; per worker if it is a list.
        max_datagram_bytes: larger UDP payloads vanish on the way, as on a path whose
            routers carry less than both ends believe.
        window_bytes: what a receiver's queue holds.
        timeout_s: see ``Transport``; virtual seconds.
        silence_s: see ``Transport``; virtual seconds.
        join_timeout_s: how long the workers may take to join; None: timeout_s.
        first_counter: counter of the first round, to test its wrap-around; per worker
            if it is a list, and the server then has the first worker's.
        absent: ranks that never join.
        tick_s: the clock stops at multiples of it only, so what is due in between is
            delivered together, as to a process that wakes up so often. 0: exact times.
    """

    def __init__(
        self,
        world_size: int,
        buckets: tuple[BucketSpec, ...] | list[tuple[BucketSpec, ...]],
        bound: LossBound | list[LossBound],
        *,
        to_server: Impairments | None = None,
        to_worker: Impairments | None = None,
        seed: int = 0,
        mtu: int | list[int] = 1500,
        max_datagram_bytes: int = 65507,
        window_bytes: int = 1 << 22,
        timeout_s: float = 600.0,
        silence_s: float = 300.0,
        join_timeout_s: float | None = None,
        first_counter: int | list[int] = 1,
        absent: Sequence[int] = (),
        tick_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.on_turn: Callable[[], None] = _do_nothing
        """Called in every turn, before anything is delivered."""
        self._tick_s = tick_s
        self._max_datagram_bytes = max_datagram_bytes
        self._out = memoryview(bytearray(BATCH_BYTES))
        self._idle_turns = 0
        first_counter_W = _per_worker(first_counter, world_size)
        self.server = ServerEndpoint(
            world_size,
            session=seed + 1,
            now=0.0,
            timeout_s=timeout_s,
            silence_s=silence_s,
            join_timeout_s=join_timeout_s,
            first_counter=first_counter_W[0],
        )
        rng = np.random.default_rng(seed)
        up, down = to_server or Impairments(), to_worker or Impairments()
        self._server = Station(
            self.server,
            {
                rank: ImpairedPath(up, own)
                for rank, own in enumerate(rng.spawn(world_size))
            },
        )
        self.workers: list[WorkerEndpoint] = []
        self._workers: list[Station] = []
        buckets_W = _per_worker(buckets, world_size)
        bound_W = _per_worker(bound, world_size)
        mtu_W = _per_worker(mtu, world_size)
        for rank, own in enumerate(rng.spawn(world_size)):
            worker = WorkerEndpoint(
                rank,
                world_size,
                buckets_W[rank],
                bound_W[rank],
                timeout_s=timeout_s,
                silence_s=silence_s,
                first_counter=first_counter_W[rank],
            )
            self.workers.append(worker)
            station = Station(worker, {LINK: ImpairedPath(down, own)})
            station.is_dead = rank in absent
            self._workers.append(station)
            if station.is_dead:
                continue
            server_link, worker_link = (
                Link(
                    -1,
                    "a new connection",
                    f"fake {rank}",
                    udp_port=1 + rank,
                    peer_udp_port=1 + rank,
                    mtu=mtu_W[rank],
                    window_bytes=window_bytes,
                )
                for _ in range(2)
            )
            self.server.accept(rank, server_link)
            worker.connect(worker_link, 0.0)

    # -- what a test does ------------------------------------------------------

    def start(self) -> list[Started]:
        """Run the handshake until every rank has started."""
        return self.run_until(Started)

    def all_reduce(
        self, grad_WN: list[NDArray[Any]], weight_W: list[float]
    ) -> list[Reduced]:
        """One round; each worker's array holds the mean afterwards."""
        self.begin(grad_WN, weight_W)
        return self.run_until(Reduced)

    def begin(self, grad_WN: list[NDArray[Any]], weight_W: list[float]) -> None:
        """Have every worker start a round, and nothing else."""
        for worker, grad_N, weight in zip(self.workers, grad_WN, weight_W, strict=True):
            worker.all_reduce(grad_N, weight, self.now)

    def all_gather(self, data_W: list[bytes]) -> list[Gathered]:
        """One all-gather."""
        for worker, data in zip(self.workers, data_W, strict=True):
            worker.all_gather(data)
        return self.run_until(Gathered)

    def close(self) -> None:
        """Every worker says goodbye; run until the server has ended."""
        for worker in self.workers:
            worker.close()
        is_alive = True
        while is_alive:
            is_alive = self.turn()
            if self.server.error is not None:
                raise self.server.error
            if any(isinstance(event, Ended) for event in self._server.events):
                return
        raise AssertionError(f"the server did not end by {self.now} s")

    def run_until(self, kind: type[E], ranks: Iterable[int] | None = None) -> list[E]:
        """Turn until these workers have an event of this kind, by default all.

        Returns:
            Their events, in the order of ``ranks``.

        Raises:
            TailboundError: one of them failed.
            AssertionError: nothing is due any more, or the machines spin.
        """
        waiting = list(range(len(self.workers)) if ranks is None else ranks)
        found: dict[int, E] = {}
        is_alive = True
        while is_alive:
            is_alive = self.turn()
            for rank in waiting:
                events = self._workers[rank].events
                while rank not in found and events:
                    event = events.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, kind):
                        found[rank] = event
            if len(found) == len(waiting):
                return [found[rank] for rank in waiting]
        raise AssertionError(f"no {kind.__name__} on every worker by {self.now} s")

    def run_for(self, duration_s: float) -> None:
        """Let virtual seconds pass, whatever happens in them."""
        stop_s = self.now + duration_s
        while self.now < stop_s:
            self._turn(stop_s)
        self.deliver()

    def cut_udp(
        self, *, from_ranks: Iterable[int] = (), to_ranks: Iterable[int] = ()
    ) -> None:
        """From now on datagrams from or to these workers vanish."""
        self._server.cut.update(from_ranks)
        for rank in to_ranks:
            self._workers[rank].cut.add(LINK)

    def mend_udp(self) -> None:
        """Undo every cut."""
        for station in (self._server, *self._workers):
            station.cut.clear()

    def kill(self, rank: int) -> None:
        """End a worker's process; the server sees its connection close."""
        self._workers[rank].is_dead = True
        self.server.lose_link(rank, "its connection closed", self.now)

    def inject(self, rank: int, data: bytes, *, to_server: bool = True) -> None:
        """Put a datagram of anyone's making onto a link, past the impairments."""
        station = self._server if to_server else self._workers[rank]
        number = rank if to_server else LINK
        station.endpoint.receive_datagrams(
            number, memoryview(data), len(data), len(data), self.now
        )

    def deliver(self) -> bool:
        """Let everything due at ``now`` happen; the clock stands.

        Returns:
            True if anything moved.
        """
        self.on_turn()
        stations = self._living()
        for station in stations:
            self._settle(station)
        # A test or a timer may have moved any of them; later only news does.
        busy = stations
        moved = False
        while busy:
            for station in busy:
                moved |= self._send(station)
            busy = [station for station in stations if self._receive(station)]
            moved |= bool(busy)
        return moved

    def turn(self) -> bool:
        """Let everything due at ``now`` happen, then move the clock.

        Returns:
            False if nothing is due ever again.
        """
        return self._turn(math.inf)

    # -- inside ----------------------------------------------------------------

    def _turn(self, stop_s: float) -> bool:
        """See turn; the clock moves to ``stop_s`` at most."""
        moved = self.deliver()
        stations = self._living()
        next_s = min(stop_s, *(self._next_s(station) for station in stations))
        if next_s == math.inf:
            return False
        if self._tick_s:
            # The product may be a hair below what it was made from.
            on_tick_s = math.ceil(next_s / self._tick_s) * self._tick_s
            next_s = max(next_s, on_tick_s)
        self._idle_turns = 0 if moved or next_s > self.now else self._idle_turns + 1
        if self._idle_turns > MAX_IDLE_TURNS:
            raise AssertionError(f"a timer is due at {next_s} s with nothing to do")
        self.now = max(self.now, next_s)
        for station in stations:
            due = station.endpoint.timer()
            if due is not None and due <= self.now:
                station.endpoint.handle_timer(self.now)
        return True

    def _living(self) -> list[Station]:
        return [s for s in (self._server, *self._workers) if not s.is_dead]

    def _send(self, station: Station) -> bool:
        """Carry what an endpoint has to send onto the paths."""
        if station is not self._server:
            rank = self._workers.index(station)
            return self._carry(station.endpoint, LINK, self._server, rank)
        moved = False
        for rank, worker in enumerate(self._workers):
            if not worker.is_dead:
                moved |= self._carry(self.server, rank, worker, LINK)
        return moved

    def _carry(self, source: Endpoint, link: int, target: Station, number: int) -> bool:
        path = target.paths[number]
        moved = False
        while True:
            while (data := source.next_control(link)) is not None:
                path.push_control(data, self.now)
                moved = True
            sent = source.next_datagrams(
                link,
                self._out,
                self.now,
                max_segments=MAX_SEGMENTS,
                max_bytes=BATCH_BYTES,
            )
            if sent is None:
                return moved
            moved = True
            fits = min(sent) <= self._max_datagram_bytes
            if fits and number not in target.cut:
                path.push_datagrams(Batch(self._out, *sent), self.now)

    def _receive(self, station: Station) -> bool:
        """Hand an endpoint what is due, as a driver does: datagrams, then control."""
        due = [
            (number, path)
            for number, path in station.paths.items()
            if (due_s := path.next_due_s()) is not None and due_s <= self.now
        ]
        if not due:
            return False
        endpoint = station.endpoint
        control = [(number, path.pop_control(self.now)) for number, path in due]
        for number, path in due:
            for batch in path.pop_datagrams(self.now):
                endpoint.receive_datagrams(number, *batch, self.now)
        endpoint.settle(self.now)
        for number, messages in control:
            for data in messages:
                endpoint.receive_control(number, data, self.now)
        self._settle(station)
        return True

    def _settle(self, station: Station) -> None:
        station.endpoint.settle(self.now)
        while (event := station.endpoint.next_event()) is not None:
            station.events.append(event)

    def _next_s(self, station: Station) -> float:
        dues = [path.next_due_s() for path in station.paths.values()]
        # A pending repair waits for next_datagrams, which the endpoint's timer covers.
        dues.append(station.endpoint.timer())
        return min((due for due in dues if due is not None), default=math.inf)


def _per_worker(value: T | list[T], world_size: int) -> list[T]:
    """One value per worker."""
    return value if isinstance(value, list) else [value] * world_size


def _do_nothing() -> None:
    """Stand in for a hook that nobody set."""

"""A whole server-plan job in memory: endpoints, bad links, a clock that jumps.

No socket and no sleep: time moves to whatever is due next. Everything follows from the
seed, so a failing run is replayed by its seed.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.impairments import Impairments
from tailbound.protocol.endpoint import Endpoint, Link
from tailbound.protocol.events import Event, Failed, Gathered, Reduced, Started
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.wire import BucketSpec
from tailbound.protocol.worker import LINK, WorkerEndpoint
from tailbound.testing.impaired_path import Batch, ImpairedPath

BATCH_BYTES = 65535
MAX_SEGMENTS = 64
MAX_IDLE_TURNS = 10_000_000
"""Bounds a run that makes no progress, rather than letting a test hang."""


@dataclass(slots=True)
class Station:
    """One endpoint and the paths that lead to it, one per link."""

    endpoint: Endpoint
    paths: dict[int, ImpairedPath]
    events: deque[Event] = field(default_factory=deque)
    cut: bool = False
    """Datagrams towards this endpoint vanish; control still passes."""


class FakeNet:
    """A server and its workers over impaired links.

    Args:
        world_size: workers.
        buckets: what they reduce.
        bound: their loss bound.
        to_server: what happens to what the server receives.
        to_worker: what happens to what the workers receive.
        seed: of every draw.
        mtu: bytes of an IP packet on every link.
        timeout_s: see ``Transport``; virtual seconds.
        first_counter: counter of the first round, to test its wrap-around.
    """

    def __init__(
        self,
        world_size: int,
        buckets: tuple[BucketSpec, ...],
        bound: LossBound,
        *,
        to_server: Impairments | None = None,
        to_worker: Impairments | None = None,
        seed: int = 0,
        mtu: int = 1500,
        window_bytes: int = 1 << 22,
        timeout_s: float = 600.0,
        silence_s: float = 300.0,
        first_counter: int = 1,
    ) -> None:
        self.now = 0.0
        self.server = ServerEndpoint(
            world_size,
            session=seed + 1,
            now=0.0,
            timeout_s=timeout_s,
            silence_s=silence_s,
            first_counter=first_counter,
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
        for rank, own in enumerate(rng.spawn(world_size)):
            worker = WorkerEndpoint(
                rank,
                world_size,
                buckets,
                bound,
                timeout_s=timeout_s,
                silence_s=silence_s,
                first_counter=first_counter,
            )
            self.workers.append(worker)
            self._workers.append(Station(worker, {LINK: ImpairedPath(down, own)}))
            for endpoint, number in ((self.server, rank), (worker, LINK)):
                link = Link(-1, "a new connection", f"fake {rank}")
                link.mtu, link.window_bytes = mtu, window_bytes
                link.udp_port = link.peer_udp_port = 1 + rank
                if isinstance(endpoint, ServerEndpoint):
                    endpoint.accept(number, link)
                else:
                    endpoint.connect(link, 0.0)

    # -- what a test does ------------------------------------------------------

    def start(self) -> None:
        """Run the handshake until every rank has started."""
        self._run_until(Started)

    def all_reduce(
        self, grad_WN: list[NDArray[Any]], weight_W: list[float]
    ) -> list[Reduced]:
        """One round; each worker's array holds the mean afterwards."""
        for worker, grad_N, weight in zip(self.workers, grad_WN, weight_W, strict=True):
            worker.all_reduce(grad_N, weight, self.now)
        events = self._run_until(Reduced)
        return [event for event in events if isinstance(event, Reduced)]

    def all_gather(self, data_W: list[bytes]) -> list[Gathered]:
        """One all-gather."""
        for worker, data in zip(self.workers, data_W, strict=True):
            worker.all_gather(data)
        events = self._run_until(Gathered)
        return [event for event in events if isinstance(event, Gathered)]

    def cut_udp(self, *, to_server: bool = False, to_rank: int | None = None) -> None:
        """From now on datagrams in this direction vanish."""
        if to_server:
            self._server.cut = True
        if to_rank is not None:
            self._workers[to_rank].cut = True

    def inject(self, rank: int, data: bytes, *, to_server: bool = True) -> None:
        """Put a datagram of anyone's making onto a link, past the impairments."""
        station = self._server if to_server else self._workers[rank]
        number = rank if to_server else LINK
        station.endpoint.receive_datagrams(
            number, memoryview(data), len(data), len(data), self.now
        )

    def turn(self) -> bool:
        """Let everything due at ``now`` happen, then move the clock.

        Returns:
            False if nothing is due ever again.
        """
        stations = [self._server, *self._workers]
        while self._exchange() | any([self._deliver(station) for station in stations]):
            pass
        times = [time for station in stations for time in self._times(station)]
        if not times:
            return False
        self.now = max(self.now, min(times))
        for station in stations:
            due = station.endpoint.timer()
            if due is not None and due <= self.now:
                station.endpoint.handle_timer(self.now)
        return True

    # -- inside ----------------------------------------------------------------

    def _run_until(self, kind: type[Event]) -> list[Event]:
        """Turn until every worker has an event of this kind, in rank order."""
        found: list[Event | None] = [None] * len(self._workers)
        for _ in range(MAX_IDLE_TURNS):
            alive = self.turn()
            for rank, station in enumerate(self._workers):
                while station.events:
                    event = station.events.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, kind):
                        found[rank] = event
            if all(event is not None for event in found):
                return [event for event in found if event is not None]
            if not alive:
                break
        raise AssertionError(f"no {kind.__name__} on every worker by {self.now} s")

    def _exchange(self) -> bool:
        """Carry what the endpoints have to send onto the paths."""
        moved = False
        for rank, station in enumerate(self._workers):
            moved |= self._carry(self.server, rank, station, LINK)
            moved |= self._carry(station.endpoint, LINK, self._server, rank)
        return moved

    def _carry(self, source: Endpoint, link: int, target: Station, number: int) -> bool:
        if link not in source.links:
            return False
        path = target.paths[number]
        moved = False
        out = memoryview(bytearray(BATCH_BYTES))
        while True:
            while (data := source.next_control(link)) is not None:
                path.push_control(data, self.now)
                moved = True
            sent = source.next_datagrams(
                link, out, self.now, max_segments=MAX_SEGMENTS, max_bytes=BATCH_BYTES
            )
            if sent is None:
                return moved
            moved = True
            if not target.cut:
                path.push_datagrams(Batch(out, *sent), self.now)

    def _deliver(self, station: Station) -> bool:
        endpoint = station.endpoint
        moved = False
        control = {
            number: path.pop_control(self.now) for number, path in station.paths.items()
        }
        for number, path in station.paths.items():
            for batch in path.pop_datagrams(self.now):
                endpoint.receive_datagrams(number, *batch, self.now)
                moved = True
        endpoint.settle(self.now)
        for number, messages in control.items():
            for data in messages:
                endpoint.receive_control(number, data, self.now)
                moved = True
        endpoint.settle(self.now)
        while (event := endpoint.next_event()) is not None:
            station.events.append(event)
        return moved

    def _times(self, station: Station) -> list[float]:
        dues = [path.next_due_s() for path in station.paths.values()]
        dues.append(station.endpoint.timer())
        # A pending repair waits for next_datagrams, which the endpoint's timer covers.
        return [due for due in dues if due is not None and due != float("inf")]

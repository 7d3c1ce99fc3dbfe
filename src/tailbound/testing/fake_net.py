"""A whole server-plan job in memory: endpoints, bad links, a clock that jumps.

See :mod:`tailbound.testing.fake_links`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.impairments import Impairments
from tailbound.protocol.events import Ended, Gathered, Reduced, Started
from tailbound.protocol.link import Link
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.worker import LINK, WorkerEndpoint
from tailbound.testing.fake_links import FakeLinks, Station
from tailbound.testing.impaired_path import ImpairedPath

T = TypeVar("T")


class FakeNet(FakeLinks):
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
        super().__init__(max_datagram_bytes=max_datagram_bytes, tick_s=tick_s)
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
        self._others = [self._server]
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
            station.routes[LINK] = self._server, rank
            self._server.routes[rank] = station, LINK
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


def _per_worker(value: T | list[T], world_size: int) -> list[T]:
    """One value per worker."""
    return value if isinstance(value, list) else [value] * world_size

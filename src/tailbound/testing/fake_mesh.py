"""A whole mesh in memory: endpoints, bad links, a clock that jumps.

See :mod:`tailbound.testing.fake_links`.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.impairments import Impairments
from tailbound.protocol.events import Ended, Gathered, Reduced, Started
from tailbound.protocol.link import Link
from tailbound.protocol.mesh import MeshEndpoint
from tailbound.testing.fake_links import FakeLinks, Station
from tailbound.testing.impaired_path import ImpairedPath


class FakeMesh(FakeLinks):
    """All ranks of a sharded job over impaired links.

    The number of a link is the rank that it leads to.

    Args:
        world_size: ranks.
        bound: their loss bound; per rank if it is a list.
        impairments: what happens to what each rank receives.
        seed: of every draw.
        mtu: bytes of an IP packet.
        max_datagram_bytes: larger UDP payloads vanish on the way.
        window_bytes: what a receiver's queue holds.
        timeout_s: see ``Transport``; virtual seconds.
        silence_s: see ``Transport``; virtual seconds.
        first_counter: counter of the first round, to test its wrap-around; per rank if
            it is a list.
        sessions: per rank, if they are not to agree.
        absent: ranks that never join.
        tick_s: see FakeLinks.
    """

    def __init__(
        self,
        world_size: int,
        bound: LossBound | list[LossBound],
        *,
        impairments: Impairments | None = None,
        seed: int = 0,
        mtu: int = 1500,
        max_datagram_bytes: int = 65507,
        window_bytes: int = 1 << 22,
        timeout_s: float = 600.0,
        silence_s: float = 300.0,
        first_counter: int | list[int] = 1,
        sessions: list[int] | None = None,
        absent: Sequence[int] = (),
        tick_s: float = 0.0,
    ) -> None:
        super().__init__(max_datagram_bytes=max_datagram_bytes, tick_s=tick_s)
        bounds = bound if isinstance(bound, list) else [bound] * world_size
        counters = (
            first_counter
            if isinstance(first_counter, list)
            else [first_counter] * world_size
        )
        rngs = np.random.default_rng(seed).spawn(world_size * world_size)
        self.ranks = [
            MeshEndpoint(
                rank,
                world_size,
                seed + 1 if sessions is None else sessions[rank],
                bounds[rank],
                now=0.0,
                timeout_s=timeout_s,
                silence_s=silence_s,
                first_counter=counters[rank],
            )
            for rank in range(world_size)
        ]
        worse = impairments or Impairments()
        self._workers = [
            Station(
                endpoint,
                {
                    peer: ImpairedPath(worse, rngs[endpoint.rank * world_size + peer])
                    for peer in range(world_size)
                },
            )
            for endpoint in self.ranks
        ]
        for rank in absent:
            self._workers[rank].is_dead = True
        for low, high in itertools.combinations(range(world_size), 2):
            if low in absent or high in absent:
                continue
            for here, there in ((low, high), (high, low)):
                link = Link(
                    -1,
                    "a new connection",
                    f"fake {there}",
                    udp_port=1 + there,
                    mtu=mtu,
                    window_bytes=window_bytes,
                )
                self._workers[here].routes[there] = self._workers[there], here
                if here > there:
                    self.ranks[here].connect(there, link, there)
                else:
                    self.ranks[here].accept(there, link)

    def start(self) -> list[Started]:
        """Meet until every rank has started."""
        return self.run_until(Started)

    def begin(
        self,
        grad_WN: Sequence[NDArray[Any]],
        weight_W: Sequence[float],
        *,
        ranks: Iterable[int] | None = None,
        dtype: str = "float32",
        step: int = 1,
        is_last: bool = True,
        **options: Any,
    ) -> None:
        """Have ranks start a round, and nothing else."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[rank].all_reduce(
                grad_WN[rank],
                weight_W[rank],
                self.now,
                dtype=dtype,
                step=step,
                is_last=is_last,
                **options,
            )

    def all_reduce(
        self,
        grad_WN: Sequence[NDArray[Any]],
        weight_W: Sequence[float],
        **options: Any,
    ) -> list[Reduced]:
        """One round; each rank's array holds the mean afterwards."""
        self.begin(grad_WN, weight_W, **options)
        return self.run_until(Reduced)

    def all_gather(self, data_W: Sequence[bytes]) -> list[Gathered]:
        """One all-gather."""
        for endpoint, data in zip(self.ranks, data_W, strict=True):
            endpoint.all_gather(data, self.now)
        return self.run_until(Gathered)

    def close(self) -> list[Ended]:
        """Every rank says goodbye."""
        for endpoint in self.ranks:
            endpoint.close()
        return self.run_until(Ended)

    def cut_udp(self, rank: int, peers: Iterable[int]) -> None:
        """From now on datagrams from these ranks to this one vanish."""
        self._workers[rank].cut.update(peers)

    def kill(self, rank: int) -> None:
        """End a rank's process; all others see its connection close."""
        self._workers[rank].is_dead = True
        for other, endpoint in enumerate(self.ranks):
            if other != rank:
                endpoint.lose_link(rank, "its connection closed", self.now)

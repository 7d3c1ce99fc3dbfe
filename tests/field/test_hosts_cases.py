"""FIELD.md's cases of addresses, ports and restarts, for a mesh: S17, S19, A09, A10.

Those of the server plan are in ``test_transport_cases.py``, those that need hosts of
their own in ``tests/network/test_hosts.py``.
"""

import contextlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore

from jobs import free_ports, leaves_nothing, open_fds
from tailbound.config import LossBound, Transport, format_address
from tailbound.errors import ConfigError, PeerLostError, TailboundError
from tailbound.training.rendezvous import mesh_over
from tailbound.transport.addresses import pick_address
from tailbound.transport.mesh import MeshGroup

pytestmark = pytest.mark.sockets

EXACT = LossBound.fixed(0.0)
TIMEOUT_S = 20.0


def run(
    work: Callable[[MeshGroup], Any],
    num: int = 2,
    *,
    store: HashStore | None = None,
    **settings: Any,
) -> list[Any]:
    """A mesh of threads; what each rank's work returned, or its error."""
    met = store or HashStore()
    transport = Transport(mtu=1500, timeout_s=TIMEOUT_S, **settings)

    def one(rank: int) -> Any:
        with contextlib.closing(
            mesh_over(met, "mesh", rank, num, EXACT, transport)
        ) as mesh:
            return work(mesh)

    with ThreadPoolExecutor(num) as pool:
        futures = [pool.submit(one, rank) for rank in range(num)]
        return [
            future.exception(2 * TIMEOUT_S) or future.result() for future in futures
        ]


def mean_of(mesh: MeshGroup, value: float) -> float:
    """One exact all-reduce of a vector of this value."""
    values = np.full(5000, value, np.float32)
    mesh.all_reduce(values, 1.0)
    return float(np.unique(values).item())


@pytest.mark.slow
def test_s17_two_meshes_at_once_never_mix_and_twenty_starts_in_one_store_succeed() -> (
    None
):
    """The store remembers all attempts before, as torchrun's does."""
    stores = HashStore(), HashStore()
    first, last = free_ports(12)
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(
                    run,
                    partial(mean_of, value=value),
                    store=store,
                    port_range=(first, last),
                )
                for store, value in zip(stores, (1.0, 100.0), strict=True)
            ]

        assert [job.result() for job in jobs] == [[1.0, 1.0], [100.0, 100.0]]


def udp_ports() -> set[int]:
    """Ports of the UDP sockets of this process."""
    ours = set(open_fds().values())
    lines = Path("/proc/net/udp").read_text(encoding="ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return {
        int(field[1].split(":")[1], 16)
        for field in fields
        if f"socket:[{field[9]}]" in ours
    }


def test_s17_all_sockets_of_a_mesh_lie_inside_the_range() -> None:
    """Three ranks on one host, two UDP sockets each."""
    before = udp_ports()
    first, last = free_ports(6)
    listening: list[str] = []

    def work(mesh: MeshGroup) -> set[int]:
        mean_of(mesh, 1.0)
        seen = udp_ports() - before
        mean_of(mesh, 1.0)
        return seen

    store = Listens(listening)
    outcomes = run(work, 3, port_range=(first, last), store=store)

    assert outcomes == [set(range(first, last + 1))] * 3
    ports = {int(address.rpartition(":")[2]) for address in listening}
    assert len(ports) == 3
    assert ports <= set(range(first, last + 1))


class Listens(HashStore):
    """Notes the addresses that the ranks publish."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self._heard = heard

    def set(self, key: str, value: str) -> None:
        """See Store."""
        super().set(key, value)
        if key.endswith("/all"):
            self._heard += [address for _, address in json.loads(value)]


def test_s17_a_range_that_is_too_small_for_all_ranks_here_is_a_clear_error() -> None:
    """One port less than three ranks on a host need."""
    first, last = free_ports(5)

    with leaves_nothing():
        outcomes = run(lambda mesh: None, 3, port_range=(first, last))

    assert all(
        isinstance(outcome, ConfigError | TailboundError) for outcome in outcomes
    )
    text = f"UDP ports {first} to {last} are all in use on 127.0.0.1"
    told = [str(outcome) for outcome in outcomes if text in str(outcome)]
    assert told
    assert all("this process needs 2 in all" in one for one in told)


def test_s17_a_range_that_is_too_small_for_one_rank_is_refused_at_once() -> None:
    outcomes = run(lambda mesh: None, 4, port_range=(41000, 41001))

    assert {str(outcome) for outcome in outcomes} == {
        "port_range 41000 to 41001 is too small: in a mesh of 4 ranks each needs 3 UDP "
        "ports and a TCP port, so give 3 for each rank on a host"
    }


@pytest.mark.slow
def test_s17_a_rank_without_a_port_is_named_by_the_others() -> None:
    """Rank 1 has an address of its own, where its only port is taken."""
    (port, _) = free_ports(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken, leaves_nothing():
        taken.bind(("127.0.0.2", port))
        store = HashStore()
        transports = [
            Transport(timeout_s=1.0),
            Transport(timeout_s=1.0, bind="127.0.0.2", port_range=(port, port)),
        ]

        def one(rank: int) -> Any:
            return mesh_over(store, "mesh", rank, 2, EXACT, transports[rank])

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(one, rank) for rank in range(2)]
            errors = [future.exception(TIMEOUT_S) for future in futures]

    assert isinstance(errors[1], ConfigError)
    assert f"UDP port {port} is in use on 127.0.0.2" in str(errors[1])
    assert isinstance(errors[0], PeerLostError)
    assert errors[0].peers == ("rank 1",)


@pytest.mark.parametrize("bind", ["127.0.0.2", "lo"])
def test_a10_every_datagram_of_a_mesh_comes_from_the_address_that_was_bound(
    bind: str,
) -> None:
    def work(mesh: MeshGroup) -> tuple[float, int, int]:
        mean = mean_of(mesh, 1.0 + mesh.rank)
        counters = mesh.counters()
        return mean, counters.foreign, counters.malformed

    assert run(work, 3, bind=bind) == [(2.0, 0, 0)] * 3


def test_a10_what_comes_from_another_address_is_counted_and_not_taken_in() -> None:
    before = udp_ports()

    def work(mesh: MeshGroup) -> tuple[float, int]:
        if mesh.rank == 0:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.bind(("127.0.0.3", 0))
                for port in udp_ports() - before:
                    stranger.sendto(b"\xff" * 1472, ("127.0.0.1", port))
        mean_of(mesh, 1.0)
        return mean_of(mesh, 6.0 + mesh.rank), mesh.counters().foreign

    ((mean, foreign), (other_mean, other_foreign)) = run(work)

    assert (mean, other_mean) == (6.5, 6.5)
    assert foreign + other_foreign >= 1


def test_a09_a_mesh_over_ipv6_writes_its_addresses_with_brackets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "::1")
    heard: list[str] = []

    outcomes = run(lambda mesh: mean_of(mesh, 3.0), 2, store=Listens(heard))

    assert outcomes == [3.0, 3.0]
    assert [address[:6] for address in heard] == ["[::1]:", "[::1]:"]


def test_a09_an_address_that_means_something_on_one_link_only_comes_last() -> None:
    assert pick_address(["fe80::1%eth0", "10.1.0.2"]) == "10.1.0.2"
    assert pick_address(["fe80::1%eth0"]) == "fe80::1%eth0"
    with pytest.raises(ConfigError, match=r"no usable address among fe80::1: a link-"):
        pick_address(["fe80::1"])
    assert format_address(pick_address(["fd00::2"]), 7000) == "[fd00::2]:7000"


def test_s19_a_mesh_on_loopback_is_refused_where_ranks_are_on_several_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    outcomes = run(lambda mesh: None)

    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert str(outcome).startswith("127.0.0.1 is loopback, which peers on other")

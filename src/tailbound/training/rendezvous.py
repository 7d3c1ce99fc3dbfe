"""Where the ranks meet: who we are, and the server's address.

This is a border: it reads what ``torchrun`` puts into the environment, and the job's
own store. Nothing below it reads the environment (docs/design/0011).
"""

import logging
import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from tailbound.config import LossBound, Transport, format_address
from tailbound.errors import ConfigError, UnreachableError
from tailbound.training.meeting import first_line, meet_in
from tailbound.transport.addresses import is_loopback, resolve_bind
from tailbound.transport.group import Server
from tailbound.transport.mesh import Meeting, MeshGroup

_log = logging.getLogger("tailbound")

_attached = 0
"""Jobs attached by this process so far: each meets under its own key in the store."""
_stores: dict[str, Store] = {}
"""By the master's address. Kept: where torchrun hosts none, rank 0's store is the one
that all others read from, and it would end with its last reference."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place in the job."""

    rank: int
    world_size: int


def find_place(*, has_server: bool = False) -> Place:
    """Rank and world size: of the process group, of torchrun, or a job of one.

    Args:
        has_server: the user named a server, so this is no job of one by default.

    Raises:
        ConfigError: RANK and WORLD_SIZE are set but make no sense, or are needed.
    """
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        if has_server:
            raise ConfigError(
                "Transport(server=...) is set but RANK and WORLD_SIZE are not; start "
                "the script with torchrun or set both"
            )
        return Place(0, 1)
    try:
        place = Place(int(rank or ""), int(world_size or ""))
    except ValueError:
        place = Place(-1, 0)
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world_size} are no place in a job; start the "
            "script with torchrun"
        )
    return place


def read_secret(transport: Transport) -> Transport:
    """The transport, with the environment's secret if it has none of its own.

    Raises:
        ConfigError: the environment's is too short, or there is none and must be one.
    """
    found = os.environ.get("TAILBOUND_SECRET")
    if transport.secret is None and found:
        transport = replace(transport, secret=found)
    transport.require_credentials()
    return transport


def find_server(place: Place, transport: Transport) -> tuple[str, Server | None]:
    """The server's address; on rank 0 also the server, unless one is given.

    Raises:
        ConfigError: no store to meet in.
        UnreachableError: there is no way to the store.
        PeerLostError: the store ended, or rank 0 published no address in time.
    """
    global _attached
    _attached += 1
    if transport.server is not None:
        return transport.server, None
    store = _job_store(place, transport)
    return server_over(store, f"tailbound/{_attached}/server", place, transport)


def server_over(
    store: Store, key: str, place: Place, transport: Transport
) -> tuple[str, Server | None]:
    """Start the server on rank 0 and tell the others where, through any store.

    Args:
        store: the same on all ranks.
        key: names this server in it.
        place: this process.
        transport: how bytes travel.

    Raises:
        PeerLostError: the store ended, or a rank did not come in time.
    """
    server = None
    if place.rank == 0:
        host = _our_host(store, place, transport)
        server = Server(place.world_size, host=host, transport=transport)
    try:
        met = meet_in(
            store,
            key,
            place.rank,
            place.world_size,
            "" if server is None else server.address,
            timeout_s=transport.timeout_s,
        )
    except BaseException:
        if server is not None:
            server.close()
        raise
    return met.addresses[0], server


def join_mesh(place: Place, bound: LossBound, transport: Transport) -> MeshGroup:
    """Meet the other ranks of the job in its own store, for the sharded plan.

    Raises:
        ConfigError: no store to meet in.
        UnreachableError: there is no way to the store, or to a rank.
        PeerLostError: the store ended, or a rank did not come in time.
    """
    global _attached
    _attached += 1
    store = _job_store(place, transport)
    key = f"tailbound/{_attached}/mesh"
    return mesh_over(store, key, place.rank, place.world_size, bound, transport)


def join_part(
    ranks: tuple[int, ...], bound: LossBound, transport: Transport
) -> MeshGroup:
    """Meet some ranks of the job in its own store, for a mesh of those alone.

    Args:
        ranks: of the job, this one among them, in an order that all of them give.
        bound: loss bound, the same on all of them.
        transport: how bytes travel.

    Raises:
        TailboundError: see ``join_mesh``.
    """
    global _attached
    _attached += 1
    place = find_place()
    store = _job_store(place, transport)
    key = f"tailbound/{_attached}/ranks/{'-'.join(map(str, ranks))}"
    rank = ranks.index(place.rank)
    return mesh_over(store, key, rank, len(ranks), bound, transport)


def mesh_over(
    store: Store,
    key: str,
    rank: int,
    world_size: int,
    bound: LossBound,
    transport: Transport,
) -> MeshGroup:
    """Meet the other ranks through any store of torch's.

    Args:
        store: the same on all ranks.
        key: names this mesh in it; a second mesh needs another one.
        rank: this process.
        world_size: ranks of the mesh.
        bound: loss bound, the same on all ranks.
        transport: how bytes travel.

    Raises:
        UnreachableError: there is no way to a rank.
        PeerLostError: the store ended, or a rank did not come in time.
    """
    transport = read_secret(transport)

    def meet(address: str) -> Meeting:
        return meet_in(
            store, key, rank, world_size, address, timeout_s=transport.timeout_s
        )

    host = _our_host(store, Place(rank, world_size), transport)
    return MeshGroup(rank, world_size, bound, transport, host=host, meet=meet)


def _host_of(store: Store) -> str:
    """Where the store is served: the route there shows which address is ours."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _our_host(store: Store, place: Place, transport: Transport) -> str:
    """The address that the other ranks shall use: on the route to the store."""
    host = resolve_bind(
        transport.bind, _host_of(store), is_loopback_fine=_is_one_host(place)
    )
    _log.info("rank %d uses address %s", place.rank, host)
    return host


def _is_one_host(place: Place) -> bool | None:
    """True or False where torchrun says so; None: judge by the peer's address."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal():
        return None
    return int(local) >= place.world_size


def _job_store(place: Place, transport: Transport) -> Store:
    if dist.is_available() and dist.is_initialized():
        # The only way to the store of an initialised group; torch has kept this name
        # since 1.8, and tests hold it.
        return dist.distributed_c10d._get_default_store()
    missing = [
        name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not set: start the script with torchrun, or give "
            "Transport(plan='server', server='host:port') of a `tailbound serve`"
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"MASTER_PORT is 1 to 65535, not {port!r}")
    host = os.environ["MASTER_ADDR"]
    if transport.bind is None and _is_one_host(place) is False and is_loopback(host):
        raise ConfigError(
            f"MASTER_ADDR={host} is loopback, but the ranks run on several hosts: "
            "start torchrun on each host with --local-addr and an address of that "
            "host, since its name leads nowhere"
        )
    master = format_address(host, int(port))
    if master not in _stores:
        try:
            timeout = timedelta(seconds=transport.timeout_s)
            met = rendezvous("env://", timeout=timeout)
            _stores[master], _, _ = next(iter(met))
        except RuntimeError as error:
            raise UnreachableError(
                "TCP",
                "the job's store",
                master,
                f"{first_line(error)}; do MASTER_ADDR and MASTER_PORT name rank 0's "
                "host, were all ranks started, and is the port free there?",
            ) from error
    return _stores[master]

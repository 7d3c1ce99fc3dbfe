"""Where the ranks meet, from the environment and the job's store."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from tailbound.config import Transport
from tailbound.errors import ConfigError, PeerLostError, UnreachableError
from tailbound.training.rendezvous import Place, find_place, find_server

TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
QUICK = Transport(timeout_s=0.5)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def process_group() -> Iterator[HashStore]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def host_store(clean_environment: pytest.MonkeyPatch) -> TCPStore:
    """A store as torchrun's agent hosts it, until its last reference is gone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clean_environment.setenv("RANK", "0")
    clean_environment.setenv("WORLD_SIZE", "2")
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
    clean_environment.setenv("MASTER_PORT", str(store.port))
    clean_environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


# -- our place ---------------------------------------------------------------------


def test_without_torchrun_a_job_has_one_rank() -> None:
    assert find_place() == Place(0, 1)


def test_torchrun_says_the_place(clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("RANK", "2")
    clean_environment.setenv("WORLD_SIZE", "3")

    assert find_place(has_server=True) == Place(2, 3)


def test_a_process_group_says_the_place_before_torchrun(
    clean_environment: pytest.MonkeyPatch, process_group: HashStore
) -> None:
    clean_environment.setenv("RANK", "2")
    clean_environment.setenv("WORLD_SIZE", "3")

    assert find_place() == Place(0, 1)


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [("2", "2"), ("-1", "2"), ("x", "2"), ("0", None), (None, "2"), ("0", "0")],
)
def test_an_impossible_place_is_refused(
    clean_environment: pytest.MonkeyPatch, rank: str | None, world_size: str | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            clean_environment.setenv(name, value)

    with pytest.raises(ConfigError, match=f"RANK={rank} and WORLD_SIZE={world_size}"):
        find_place()


def test_a_named_server_needs_a_place() -> None:
    """Else a script started without torchrun would train alone, and nobody notice."""
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are not"):
        find_place(has_server=True)


# -- the server's address ------------------------------------------------------------


def test_a_named_server_needs_no_store() -> None:
    transport = Transport(plan="server", server="10.0.0.1:29400")

    assert find_server(Place(1, 2), transport) == ("10.0.0.1:29400", None)


def test_without_a_store_to_meet_in_the_remedy_is_named(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")

    with pytest.raises(ConfigError, match=r"^MASTER_PORT not set: start the script"):
        find_server(Place(1, 2), QUICK)


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_an_impossible_master_port_is_refused(
    clean_environment: pytest.MonkeyPatch, port: str
) -> None:
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
    clean_environment.setenv("MASTER_PORT", port)

    with pytest.raises(ConfigError, match=f"1 to 65535, not '{port}'"):
        find_server(Place(1, 2), QUICK)


@pytest.mark.sockets
def test_rank_0_serves_and_publishes_its_address(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)

    address, server = find_server(Place(0, 2), QUICK)

    assert server is not None
    assert address == server.address
    assert address.startswith("127.0.0.1:")
    published = [agent.get(f"tailbound/0/{n}/server") for n in attached(agent)]
    server.close()
    assert published[-1].decode() == address


def attached(store: Store, attempt: int = 0) -> list[int]:
    """Which jobs of this process have an address in the store."""
    return [
        n for n in range(1, 200) if store.check([f"tailbound/{attempt}/{n}/server"])
    ]


@pytest.mark.sockets
def test_another_rank_reads_the_address_of_its_own_attempt(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)
    clean_environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for n in range(1, 200):
        agent.set(f"tailbound/0/{n}/server", "127.0.0.1:1")
        agent.set(f"tailbound/1/{n}/server", "127.0.0.1:2")

    assert find_server(Place(1, 2), QUICK) == ("127.0.0.1:2", None)


@pytest.mark.slow
@pytest.mark.sockets
def test_an_address_that_never_comes_names_rank_0(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)

    with pytest.raises(PeerLostError, match=r"lost rank 0 .* did it reach"):
        find_server(Place(1, 2), QUICK)

    assert attached(agent) == []


@pytest.mark.sockets
def test_a_store_that_ended_is_named(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)
    _, server = find_server(Place(0, 2), QUICK)
    assert server is not None
    server.close()
    del agent

    for rank in (1, 0):  # who waits notices first, who sends only afterwards
        with pytest.raises(PeerLostError, match="lost the job's store"):
            find_server(Place(rank, 2), QUICK)


@pytest.mark.slow
@pytest.mark.sockets
def test_a_store_that_nobody_hosts_is_named_with_its_address(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    clean_environment.setenv("RANK", "1")
    clean_environment.setenv("WORLD_SIZE", "2")
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
    clean_environment.setenv("MASTER_PORT", str(port))

    with pytest.raises(UnreachableError, match=f"job's store at 127.0.0.1:{port}"):
        find_server(Place(1, 2), QUICK)


@pytest.mark.sockets
def test_a_store_that_rank_0_hosts_stays_for_the_others(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    """Without torchrun nobody else keeps it: ranks that come later need it still."""
    port = free_port()
    clean_environment.setenv("RANK", "0")
    clean_environment.setenv("WORLD_SIZE", "1")
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
    clean_environment.setenv("MASTER_PORT", str(port))

    address, server = find_server(Place(0, 2), Transport(timeout_s=5.0))

    assert server is not None
    server.close()
    late = TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        timeout=timedelta(seconds=5),
        wait_for_workers=False,
    )
    (n,) = attached(late)
    assert late.get(f"tailbound/0/{n}/server").decode() == address


@pytest.mark.sockets
def test_an_initialised_process_groups_own_store_is_used(
    process_group: HashStore,
) -> None:
    address, server = find_server(Place(0, 2), QUICK)

    assert server is not None
    server.close()
    group_store = dist.distributed_c10d._get_default_store()
    published = [
        group_store.get(f"tailbound/0/{n}/server") for n in attached(group_store)
    ]
    assert published == [address.encode()]


@pytest.mark.sockets
@pytest.mark.parametrize(("local", "works"), [("2", True), ("1", False)])
def test_a_server_on_loopback_is_for_ranks_on_one_host(
    clean_environment: pytest.MonkeyPatch,
    process_group: HashStore,
    local: str,
    works: bool,
) -> None:
    clean_environment.setenv("LOCAL_WORLD_SIZE", local)

    if works:
        server = find_server(Place(0, 2), QUICK)[1]
        assert server is not None
        server.close()
    else:
        with pytest.raises(ConfigError, match="is loopback, which peers on other"):
            find_server(Place(0, 2), QUICK)

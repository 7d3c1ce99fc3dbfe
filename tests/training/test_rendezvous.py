"""Where the ranks meet, from the environment and the job's store."""

import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, PeerLostError, UnreachableError
from tailbound.training.rendezvous import (
    Place,
    find_place,
    find_server,
    mesh_over,
    read_secret,
    server_over,
)
from training.ranks import open_sockets

TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
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


def attached(store: Store) -> list[int]:
    """Which jobs of this process have met in the store."""
    return [n for n in range(1, 200) if store.check([f"tailbound/{n}/server"])]


@pytest.mark.sockets
def test_the_first_rank_serves_and_the_second_learns_where() -> None:
    """Three times in one store, which keeps what it was told: as torchrun's does."""
    store = HashStore()
    found = []
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server_over, store, "key", Place(1, 2), QUICK)
            address, server = server_over(store, "key", Place(0, 2), QUICK)
            assert server is not None
            assert other.result(10.0) == (address, None)
            assert server.address == address
        server.close()
        found.append(address)

    assert len(set(found)) == 3
    assert all(address.startswith("127.0.0.1:") for address in found)


@pytest.mark.sockets
def test_a_server_that_nobody_came_to_is_closed() -> None:
    before = open_sockets()

    with pytest.raises(PeerLostError, match="lost rank 1 during start-up"):
        server_over(HashStore(), "key", Place(0, 2), Transport(timeout_s=0.05))

    assert open_sockets() == before


@pytest.mark.slow
@pytest.mark.sockets
def test_an_address_that_never_comes_names_rank_0(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)

    with pytest.raises(PeerLostError, match=r"lost rank 0 .* did it get"):
        find_server(Place(1, 2), QUICK)

    assert attached(agent) == []


@pytest.mark.sockets
def test_a_store_that_ended_is_named(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    agent = host_store(clean_environment)
    _, server = find_server(Place(0, 1), QUICK)
    assert server is not None
    server.close()
    del agent

    for rank in (1, 0):
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

    address, server = find_server(Place(0, 1), Transport(timeout_s=5.0))

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
    session = late.get(f"tailbound/{n}/server").decode()
    assert address in late.get(f"tailbound/{n}/server/{session}/all").decode()


@pytest.mark.sockets
def test_an_initialised_process_groups_own_store_is_used(
    process_group: HashStore,
) -> None:
    _, server = find_server(Place(0, 1), QUICK)

    assert server is not None
    server.close()
    assert len(attached(dist.distributed_c10d._get_default_store())) == 1


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
        with pytest.raises(PeerLostError, match="lost rank 1"):
            find_server(Place(0, 2), Transport(timeout_s=0.05))
    else:
        with pytest.raises(ConfigError, match="is loopback, which peers on other"):
            find_server(Place(0, 2), QUICK)


# -- addresses -----------------------------------------------------------------------


def test_s19_a_master_on_loopback_is_refused_where_ranks_are_on_several_hosts(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    """What torchrun says where a host's own name leads to 127.0.1.1."""
    clean_environment.setenv("MASTER_ADDR", "localhost")
    clean_environment.setenv("MASTER_PORT", "29500")
    clean_environment.setenv("LOCAL_WORLD_SIZE", "1")

    with pytest.raises(ConfigError) as caught:
        find_server(Place(1, 2), QUICK)

    assert str(caught.value) == (
        "MASTER_ADDR=localhost is loopback, but the ranks run on several hosts: start "
        "torchrun on each host with --local-addr and an address of that host, since "
        "its name leads nowhere"
    )


@pytest.mark.slow
@pytest.mark.sockets
def test_with_an_address_to_bind_the_store_may_be_behind_a_tunnel(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    clean_environment.setenv("RANK", "1")
    clean_environment.setenv("WORLD_SIZE", "2")
    clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
    clean_environment.setenv("MASTER_PORT", str(free_port()))
    clean_environment.setenv("LOCAL_WORLD_SIZE", "1")

    with pytest.raises(UnreachableError, match=r"job's store at 127\.0"):
        find_server(Place(1, 2), Transport(timeout_s=0.5, bind="127.0.0.1"))


def test_s19_each_rank_says_which_address_it_uses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO, "tailbound"),
        pytest.raises(PeerLostError, match="lost rank 1"),
    ):
        mesh_over(
            HashStore(), "key", 0, 2, LossBound(), Transport(timeout_s=0.05)
        ).close()

    assert [record.message for record in caplog.records] == [
        "rank 0 uses address 127.0.0.1"
    ]


def test_the_environments_secret_is_taken_where_the_script_gives_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Transport(secret="the script's own secret")
    monkeypatch.setenv("TAILBOUND_SECRET", "correct horse battery")

    assert read_secret(Transport(mtu=1500)) == Transport(
        mtu=1500, secret="correct horse battery"
    )
    assert read_secret(own) is own


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_secret_in_the_environment_there_is_none(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TAILBOUND_SECRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TAILBOUND_SECRET", value)

    assert read_secret(Transport()).secret is None


def test_a_secret_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILBOUND_SECRET", "hunter2")

    with pytest.raises(ConfigError, match="16 characters or more") as caught:
        read_secret(Transport())

    assert "hunter2" not in str(caught.value)

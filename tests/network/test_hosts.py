"""A mesh on several hosts, with real packets: interfaces, ports, IPv6 (FIELD S19)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from namespaces import Hosts, make_hosts, needs_namespaces

PROGRAM = str(Path(__file__).with_name("host_rank.py"))
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(150)]
STORE_PORT = 29444


def run_ranks(
    commands: list[list[str]], master: str, port: int, **local: str
) -> list[tuple[int, str, str]]:
    """Start a rank with each command; exit code, standard output and error."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # hosts without names make the store warn
        "WORLD_SIZE": str(len(commands)),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        **local,
    }
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "RANK": str(rank)},
        )
        for rank, command in enumerate(commands)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *told) for rank, told in zip(ranks, outputs, strict=True)]


def run_on(
    hosts: Hosts, num: int, master: str, settings: dict[str, Any]
) -> list[tuple[int, str, str]]:
    """A rank on each host."""
    rank = [sys.executable, PROGRAM, json.dumps(settings)]
    commands = [hosts.command(host, *rank) for host in range(num)]
    return run_ranks(commands, master, STORE_PORT)


def answers(outcomes: list[tuple[int, str, str]]) -> list[Any]:
    """What the ranks printed, if all got on well."""
    assert [(code, error) for code, _, error in outcomes] == [(0, "")] * len(outcomes)
    return [json.loads(output) for _, output, _ in outcomes]


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("network", [0, 1])
def test_the_route_to_the_store_decides_which_interface_carries_the_data(
    network: int,
) -> None:
    with make_hosts(2, num_networks=2) as hosts:
        told = answers(run_on(hosts, 2, hosts.address(0, network), {}))
        received = [hosts.received_bytes(1, f"eth{number}") for number in range(2)]

    assert [address for address, _, _ in told] == [
        f"rank 0 uses address 10.{78 + network}.0.1",
        f"rank 1 uses address 10.{78 + network}.0.2",
    ]
    assert [mean for _, mean, _ in told] == [-4.5, -4.5]
    assert received[network] > 6_000_000
    assert received[1 - network] < 100_000


@needs_namespaces
@pytest.mark.netns
def test_bind_takes_an_interfaces_name_and_leaves_the_store_where_it_is() -> None:
    with make_hosts(2, num_networks=2) as hosts:
        told = answers(run_on(hosts, 2, hosts.address(0), {"bind": "eth1"}))
        received = [hosts.received_bytes(1, f"eth{number}") for number in range(2)]

    assert [address for address, _, _ in told] == [
        "rank 0 uses address 10.79.0.1",
        "rank 1 uses address 10.79.0.2",
    ]
    assert received[0] < 100_000
    assert received[1] > 6_000_000


@needs_namespaces
@pytest.mark.netns
def test_hosts_without_ipv4_work() -> None:
    with make_hosts(2, ip_version=6) as hosts:
        told = answers(run_on(hosts, 2, "fd78::1", {}))

    assert [address for address, _, _ in told] == [
        "rank 0 uses address fd78::1",
        "rank 1 uses address fd78::2",
    ]
    assert [mean for _, mean, _ in told] == [-4.5, -4.5]


@needs_namespaces
@pytest.mark.netns
def test_a_firewall_that_lets_the_range_and_the_store_through_is_enough() -> None:
    """Three hosts: each needs two UDP ports and one for TCP."""
    with make_hosts(3) as hosts:
        for host in range(3):
            hosts.refuse(host, f"{{ {STORE_PORT}, 41000-41001 }}", "41000-41001")

        told = answers(
            run_on(hosts, 3, hosts.address(0), {"port_range": [41000, 41001]})
        )

    assert [ports for _, _, ports in told] == [[41000, 41001]] * 3
    assert [mean for _, mean, _ in told] == [-6.0] * 3


@pytest.mark.sockets
def test_loopback_of_ipv6_works() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]

    told = answers(
        run_ranks(
            [[sys.executable, PROGRAM, "{}"]] * 2, "::1", port, LOCAL_WORLD_SIZE="2"
        )
    )

    assert [address for address, _, _ in told] == [
        "rank 0 uses address ::1",
        "rank 1 uses address ::1",
    ]

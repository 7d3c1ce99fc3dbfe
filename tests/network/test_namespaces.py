"""A server and its workers on hosts of their own, with real packets and real drops."""

import json
import os
import subprocess
import sys

import pytest

from namespaces import Hosts, make_hosts, needs_namespaces

pytestmark = [
    needs_namespaces,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.sockets,
]

PROGRAM = """
import json, sys
import numpy as np
from tailbound.config import LossBound, Transport
from tailbound.errors import TailboundError
from tailbound.protocol.messages import (BucketSpec)
from tailbound.transport.group import Group, Server

role, address, bound, rounds, num, mtu = json.loads(sys.argv[1])
transport = Transport(timeout_s=20.0, mtu=mtu)
try:
    if role == "server":
        server = Server(2, host=address, port=29400, transport=transport)
        print("ready", flush=True)
        server.run()
        print(json.dumps(server.endpoint.counters().accepted))
    else:
        group = Group(address, rank=role, world_size=2, transport=transport,
                      buckets=(BucketSpec("float32", ("g",), ((num,),)),),
                      bound=LossBound.fixed(bound))
        seen = []
        for index in range(rounds):
            grad = np.full(num, 4.0 * (index + 1) + 2.0 * role, np.float32)
            reduced = group.all_reduce(grad, 1.0)
            way_in = reduced.reports[0]
            seen.append([grad.min().item(), grad.max().item(), way_in.missing,
                         way_in.num_chunks, way_in.sends])
        print(json.dumps({"bytes": group.payload_bytes, "rounds": seen}))
        group.close()
except TailboundError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(1)
"""


def launch(hosts: Hosts, host: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    return subprocess.Popen(
        hosts.command(host, *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def run_job(
    hosts: Hosts, *, bound: float, rounds: int, num: int, mtu: int | str = "auto"
) -> tuple[list[int], list[str], list[str]]:
    """Server on host 0, workers on hosts 1 and 2; exit codes, outputs, errors."""
    where = hosts.address(0)
    server = launch(hosts, 0, "server", where, bound, rounds, num, mtu)
    processes = [server]
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        processes += [
            launch(hosts, 1 + rank, rank, f"{where}:29400", bound, rounds, num, mtu)
            for rank in range(2)
        ]
        told = [process.communicate(timeout=40) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return (
        [process.returncode for process in processes],
        [out for out, _ in told],
        [err for _, err in told],
    )


@pytest.mark.timeout(120)
def test_real_loss_of_five_percent_leaves_exact_rounds_exact() -> None:
    with make_hosts(3) as hosts:
        for host in range(3):
            hosts.drop(host, "meta l4proto udp numgen random mod 1000 < 50")

        codes, outputs, errors = run_job(hosts, bound=0.0, rounds=10, num=100_000)

    assert (codes, errors) == ([0, 0, 0], ["", "", ""])
    for output in outputs[1:]:
        told = json.loads(output)
        # An Ethernet packet of 1500 bytes less IP, UDP and our header.
        assert told["bytes"] == 1448
        assert [entry[:3] for entry in told["rounds"]] == [
            [4.0 * step + 1.0, 4.0 * step + 1.0, 0] for step in range(1, 11)
        ]


@pytest.mark.timeout(120)
def test_real_loss_within_the_bound_is_given_up_not_repaired() -> None:
    with make_hosts(3) as hosts:
        hosts.drop(0, "meta l4proto udp numgen random mod 1000 < 50")

        codes, outputs, errors = run_job(hosts, bound=0.408, rounds=10, num=100_000)

    assert (codes, errors) == ([0, 0, 0], ["", "", ""])
    rounds = [entry for output in outputs[1:] for entry in json.loads(output)["rounds"]]
    assert all(missing <= int(0.408 * chunks) for _, _, missing, chunks, _ in rounds)
    assert sum(missing for _, _, missing, _, _ in rounds) > 0
    assert {sends for *_, sends in rounds} == {1}


@pytest.mark.timeout(120)
def test_udp_that_a_firewall_eats_is_named_with_rank_and_port() -> None:
    with make_hosts(3) as hosts:
        hosts.drop(2, "meta l4proto udp")

        codes, _, errors = run_job(hosts, bound=0.0, rounds=1, num=1000)

    assert codes == [1, 1, 1]
    assert "UDP to rank 1 at 10.78.0.3 port" in errors[0]
    assert "open UDP" in errors[0]


@pytest.mark.timeout(120)
def test_a_path_that_loses_full_packets_gets_smaller_ones() -> None:
    with make_hosts(3) as hosts:
        hosts.drop(0, "meta l4proto udp udp length > 1300")

        codes, outputs, errors = run_job(hosts, bound=0.0, rounds=3, num=100_000)

    assert (codes, errors) == ([0, 0, 0], ["", "", ""])
    # IPv6's guaranteed packet of 1280 bytes less 48 bytes of headers and our own 24.
    assert [json.loads(output)["bytes"] for output in outputs[1:]] == [1208, 1208]

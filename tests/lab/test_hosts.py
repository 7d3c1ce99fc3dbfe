"""Network namespaces as hosts: real packets of MTU size, real loss, nothing left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from namespaces import needs_namespaces
from tailbound.errors import ConfigError, TailboundError
from tailbound.lab import hosts as module
from tailbound.lab.hosts import Hosts, find_obstacle, make_hosts, run

SPACES = Path("/run/netns")

# Sends packets to a host's port and says how many came: PROTOCOL ADDRESS NUM.
SEND = """
import socket, sys
address, num = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
sock = socket.socket(family, socket.SOCK_DGRAM)
for _ in range(num):
    sock.sendto(bytes(100), (address, 7000))
"""
# One megabyte over TCP, as large sends: to itself as SERVER, or to ADDRESS.
STREAM = """
import socket, sys
if sys.argv[1] == "listen":
    listener = socket.create_server(("0.0.0.0", 7001))
    print("ready", flush=True)
    peer, _ = listener.accept()
    got = 0
    while data := peer.recv(1 << 20):
        got += len(data)
    print(got)
else:
    sock = socket.create_connection((sys.argv[1], 7001), 10)
    sock.sendall(bytes(1_000_000))
"""
KILLED = """
import time
from tailbound.lab.hosts import make_hosts
with make_hosts(1) as hosts:
    print(hosts.switch, *hosts.names, flush=True)
    time.sleep(60.0)
"""


def spaces(hosts: Hosts) -> list[str]:
    """Namespaces of these hosts that there are."""
    wanted = {hosts.switch, *hosts.names}
    return sorted(path.name for path in SPACES.iterdir() if path.name in wanted)


def count(hosts: Hosts, space: str, rule: str) -> int:
    """Packets that the rule with these words has matched."""
    told = run("ip", "netns", "exec", space, "nft", "-j", "list", "ruleset")
    for item in json.loads(told)["nftables"]:
        if rule in json.dumps(item):
            for part in item["rule"]["expr"]:
                if "counter" in part:
                    return int(part["counter"]["packets"])
    raise AssertionError(told)


def test_without_root_there_are_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")

    with pytest.raises(ConfigError, match="only root may make"), make_hosts(1):
        pass


def test_a_missing_tool_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else tool)

    assert find_obstacle() == (
        "hosts need nft, not found here; install iproute2, nftables and ethtool"
    )


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(TailboundError, match=r"`sh -c echo no >&2; false` failed: no"):
        run("sh", "-c", "echo no >&2; false")


def test_a_command_that_fails_in_silence_says_so() -> None:
    with pytest.raises(TailboundError, match="`false` failed: it said nothing"):
        run("false")


def test_a_command_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMMAND_TIMEOUT_S", 0.01)

    with pytest.raises(TailboundError, match="`sleep 9` did not end within 0 s"):
        run("sleep", "9")


@pytest.mark.parametrize(
    ("ip_version", "first", "second"),
    [(4, "10.78.0.3", "10.79.0.3"), (6, "fd78::3", "fd79::3")],
)
def test_a_host_has_an_address_in_each_network(
    ip_version: int, first: str, second: str
) -> None:
    hosts = Hosts(("a", "b", "c"), "s", ip_version)

    assert [hosts.address(2), hosts.address(2, 1)] == [first, second]


@needs_namespaces
@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(60)
class TestRealHosts:
    def test_they_are_gone_after_an_error(self) -> None:
        made: list[str] = []

        def fail() -> None:
            with make_hosts(2) as hosts:
                made.extend([hosts.switch, *hosts.names])
                assert spaces(hosts) == sorted(made)
                raise KeyError

        with pytest.raises(KeyError):
            fail()

        assert len(made) == 3
        assert [name for name in made if (SPACES / name).exists()] == []

    @pytest.mark.processes
    def test_they_are_gone_when_their_maker_is_killed(self) -> None:
        maker = subprocess.Popen(
            [sys.executable, "-c", KILLED],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert maker.stdout is not None
            names = maker.stdout.readline().split()
        finally:
            maker.send_signal(signal.SIGKILL)
            maker.communicate()
        assert len(names) == 2
        deadline_s = time.monotonic() + 20.0
        while any((SPACES / name).exists() for name in names):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    @pytest.mark.parametrize("ip_version", [4, 6])
    def test_the_switch_drops_the_share_it_was_told_and_then_none(
        self, ip_version: int
    ) -> None:
        with make_hosts(2, ip_version=ip_version) as hosts:
            hosts.drop(1, "udp dport 7000")  # counts what comes through
            send = hosts.command(0, sys.executable, "-c", SEND, hosts.address(1))
            hosts.lose(0.5)
            hosts.lose(0.25)
            run(*send, "2000")
            lost = count(hosts, hosts.switch, "numgen")
            came = count(hosts, hosts.names[1], "7000")
            hosts.lose(0.0)
            run(*send, "1000")
            came_later = count(hosts, hosts.names[1], "7000") - came

        # Ten standard deviations of 2000 draws at a quarter.
        assert 500 - 194 <= lost <= 500 + 194
        assert (lost + came, came_later) == (2000, 1000)

    @pytest.mark.processes
    def test_no_packet_of_a_stream_is_larger_than_the_mtu(self) -> None:
        with make_hosts(2) as hosts:
            # An offloaded stream would pass in pieces of up to 64 KiB, and get lost.
            hosts.drop(1, "meta length > 1500")
            listener = subprocess.Popen(
                hosts.command(1, sys.executable, "-c", STREAM, "listen"),
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "ready\n"
                before = hosts.received_bytes(1)
                run(*hosts.command(0, sys.executable, "-c", STREAM, hosts.address(1)))
                told, _ = listener.communicate(timeout=10)
            finally:
                listener.kill()
                listener.wait()
            large = count(hosts, hosts.names[1], "length")
            received = hosts.received_bytes(1) - before

        assert (told, large) == ("1000000\n", 0)
        # 691 segments of 1448 bytes, 66 bytes of headers each, and a few without data.
        assert 691 * 66 + 1_000_000 <= received < 1_100_000

    def test_a_firewall_lets_in_what_it_was_told(self) -> None:
        with make_hosts(2, num_networks=2) as hosts:
            hosts.refuse(1, "{ 80 }", "{ 6999 }")
            for network in range(2):
                address = hosts.address(1, network)
                run(*hosts.command(0, sys.executable, "-c", SEND, address, "3"))
            refused = count(hosts, hosts.names[1], "6999")

        assert refused == 6

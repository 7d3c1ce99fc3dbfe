"""Several hosts on one machine: network namespaces on one bridge, with real packets.

Host i is 10.78.0.(i + 1) on eth0, and 10.79.0.(i + 1) on eth1 of a second network if
there is one; or fd78::(i + 1) on eth0 and without an IPv4 address. Segmentation offload
is off, so that every datagram is a packet of its own and a drop takes one; drops are
nftables rules on what arrives. Everything is removed when the ``with`` block ends,
whatever happened in it.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

TOOLS = ("ip", "nft", "ethtool")
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in TOOLS),
    reason="needs root and " + ", ".join(TOOLS),
)


def run(*command: str, stdin: str | None = None) -> None:
    """Run a command; its error output is the failure's text."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@dataclass(frozen=True)
class Hosts:
    """The hosts of one network."""

    names: tuple[str, ...]
    ip_version: int = 4

    def address(self, host: int, network: int = 0) -> str:
        """The address of a host in one of the networks."""
        if self.ip_version == 6:
            return f"fd{78 + network}::{host + 1}"
        return f"10.{78 + network}.0.{host + 1}"

    def command(self, host: int, *command: str) -> list[str]:
        """A command line that runs on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def drop(self, host: int, rule: str) -> None:
        """Drop arriving packets that match an nftables rule, such as ``udp dport 1``.

        Args:
            host: where they arrive.
            rule: what nftables matches before ``counter drop``.
        """
        table = (
            "table inet loss {\n chain arriving {\n"
            "  type filter hook input priority 0;\n"
            f'  iifname "lo" accept\n  {rule} counter drop\n }}\n}}\n'
        )
        run(*self.command(host, "nft", "-f", "-"), stdin=table)

    def refuse(self, host: int, tcp: str, udp: str) -> None:
        """A firewall that lets in new connections and datagrams to some ports only.

        Args:
            host: where it stands.
            tcp: ports as nftables writes a set of them, such as ``{ 80, 100-120 }``.
            udp: the same for datagrams.
        """
        self.drop(host, f"tcp flags & (syn | ack) == syn tcp dport != {tcp}")
        self.drop(host, f"udp dport != {udp}")

    def received_bytes(self, host: int, device: str) -> int:
        """What a network card of a host has received so far."""
        command = self.command(
            host, "cat", f"/sys/class/net/{device}/statistics/rx_bytes"
        )
        return int(subprocess.check_output(command, timeout=20))


@contextlib.contextmanager
def make_hosts(
    num: int, *, mtu: int = 1500, ip_version: int = 4, num_networks: int = 1
) -> Iterator[Hosts]:
    """Make ``num`` hosts on one or more switches, and remove them."""
    prefix = f"tb{os.getpid() % 100000}"
    switch = f"{prefix}s"
    names = tuple(f"{prefix}h{host}" for host in range(num))
    hosts = Hosts(names, ip_version)
    try:
        run("ip", "netns", "add", switch)
        for network in range(num_networks):
            bridge = f"br{network}"
            run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            run("ip", "-n", switch, "link", "set", bridge, "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            for network in range(num_networks):
                address = hosts.address(host, network)
                _plug_in(switch, host, name, network, address, mtu)
        yield hosts
    finally:
        for name in (switch, *names):
            subprocess.run(
                ["ip", "netns", "del", name],
                capture_output=True,
                timeout=20,
                check=False,
            )


def _plug_in(
    switch: str, host: int, name: str, network: int, address: str, mtu: int
) -> None:
    """Give a host a card in one of the networks."""
    device, peer = f"eth{network}", f"p{network}x{host}"
    run(
        *("ip", "link", "add", device, "netns", name, "type", "veth"),
        *("peer", "name", peer, "netns", switch),
    )
    run("ip", "-n", switch, "link", "set", peer, "mtu", str(mtu))
    run("ip", "-n", switch, "link", "set", peer, "master", f"br{network}", "up")
    run("ip", "-n", name, "link", "set", device, "mtu", str(mtu))
    # Without the check for duplicates an IPv6 address serves at once.
    given = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
    run("ip", "-n", name, "addr", "add", given[0], "dev", device, *given[1:])
    run("ip", "-n", name, "link", "set", device, "up")
    for space, card in ((name, device), (switch, peer)):
        for offload in ("tso", "gso", "tx-udp-segmentation"):
            # Not every kernel knows all three.
            subprocess.run(
                ["ip", "netns", "exec", space, "ethtool", "-K", card, offload, "off"],
                capture_output=True,
                timeout=20,
                check=False,
            )

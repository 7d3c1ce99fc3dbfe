"""Several hosts on one machine: network namespaces on one bridge, with real packets.

Host i is 10.78.0.(i + 1). Segmentation offload is off, so that every datagram is a
packet of its own and a drop takes one; drops are nftables rules on what arrives.
Everything is removed when the ``with`` block ends, whatever happened in it.
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

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.78.0.{host + 1}"

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


@contextlib.contextmanager
def make_hosts(num: int, *, mtu: int = 1500) -> Iterator[Hosts]:
    """Make ``num`` hosts on one switch, and remove them."""
    prefix = f"tb{os.getpid() % 100000}"
    switch = f"{prefix}s"
    names = tuple(f"{prefix}h{host}" for host in range(num))
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            peer = f"p{host}"
            run(
                *("ip", "link", "add", "eth0", "netns", name, "type", "veth"),
                *("peer", "name", peer, "netns", switch),
            )
            run("ip", "-n", switch, "link", "set", peer, "mtu", str(mtu))
            run("ip", "-n", switch, "link", "set", peer, "master", "br0", "up")
            run("ip", "-n", name, "link", "set", "eth0", "mtu", str(mtu))
            address = f"10.78.0.{host + 1}/24"
            run("ip", "-n", name, "addr", "add", address, "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            for space, device in ((name, "eth0"), (switch, peer)):
                for offload in ("tso", "gso", "tx-udp-segmentation"):
                    # Not every kernel knows all three.
                    subprocess.run(
                        [
                            "ip",
                            "netns",
                            "exec",
                            space,
                            "ethtool",
                            "-K",
                            device,
                            offload,
                            "off",
                        ],
                        capture_output=True,
                        timeout=20,
                        check=False,
                    )
        yield Hosts(names)
    finally:
        for name in (switch, *names):
            subprocess.run(
                ["ip", "netns", "del", name],
                capture_output=True,
                timeout=20,
                check=False,
            )

"""Several hosts on one machine: network namespaces on one switch, with real packets.

Host i is 10.78.0.(i + 1) on eth0, and 10.79.0.(i + 1) on eth1 of a second network if
there is one; with IPv6 fd78::(i + 1), and no IPv4 address. Offloads are off, so that
no packet is larger than the MTU, TCP's as little as UDP's, and a drop takes one.

Whatever happens to this process, kill -9 included, the namespaces are removed: a shell
that waits for the end of its input does that.
"""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from tailbound.errors import ConfigError, TailboundError

TOOLS = ("ip", "nft", "ethtool")
OFFLOADS = ("tso", "gso", "gro", "tx-udp-segmentation")
COMMAND_TIMEOUT_S = 20.0
RESOLUTION = 1_000_000
"""A loss is a whole number of packets of so many."""
REMOVE = (
    "trap '' INT TERM HUP; read -r _; "
    'for name in "$@"; do ip netns del "$name" 2>/dev/null; done'
)


def find_obstacle() -> str | None:
    """Why no hosts can be made here; None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return (
            f"hosts need {', '.join(missing)}, not found here; install iproute2, "
            "nftables and ethtool"
        )
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root may make"
    return None


def run(*command: str, stdin: str | None = None) -> str:
    """Run a command; its output.

    Raises:
        TailboundError: it failed or did not end; with the last line that it wrote.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TailboundError(
            f"`{' '.join(command)}` did not end within {COMMAND_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TailboundError(f"`{' '.join(command)}` failed: {last}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts on one switch."""

    names: tuple[str, ...]
    """Of their namespaces."""
    switch: str
    """The namespace that has the other end of every cable."""
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
            rule: what nftables matches before ``counter drop``; added to those before.
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

    def lose(self, share: float) -> None:
        """Let the switch drop TCP and UDP packets at random, from now on.

        Args:
            share: of all packets on their way from host to host, in [0, 1]. Takes the
                place of the share before, at once.
        """
        rule = (
            " chain passing {\n  type filter hook forward priority 0;\n"
            f"  meta l4proto {{ tcp, udp }} numgen random mod {RESOLUTION} < "
            f"{round(share * RESOLUTION)} counter drop\n }}\n"
        )
        # One transaction: no packet passes between the old rule and the new one.
        table = "table bridge loss"
        script = (
            f"{table} {{}}\ndelete {table}\n{table} {{\n{rule if share else ''}}}\n"
        )
        run("ip", "netns", "exec", self.switch, "nft", "-f", "-", stdin=script)

    def received_bytes(self, host: int, device: str = "eth0") -> int:
        """What a network card of a host has received so far."""
        path = f"/sys/class/net/{device}/statistics/rx_bytes"
        return int(run(*self.command(host, "cat", path)))


@contextlib.contextmanager
def make_hosts(
    num: int, *, mtu: int = 1500, ip_version: int = 4, num_networks: int = 1
) -> Iterator[Hosts]:
    """Make ``num`` hosts, each on one or more networks, and remove them.

    Args:
        num: hosts, 1 to 253.
        mtu: bytes of an IP packet.
        ip_version: 4 or 6.
        num_networks: network cards of each host, each with a switch of its own.

    Raises:
        ConfigError: not root, or a tool is missing.
        TailboundError: a command failed.
    """
    obstacle = find_obstacle()
    if obstacle is not None:
        raise ConfigError(obstacle)
    prefix = f"tb{uuid.uuid4().hex[:8]}"
    names = tuple(f"{prefix}h{host}" for host in range(num))
    hosts = Hosts(names, f"{prefix}s", ip_version)
    with _removed_at_the_end(hosts.switch, *names):
        run("ip", "netns", "add", hosts.switch)
        for network in range(num_networks):
            bridge = f"br{network}"
            run("ip", "-n", hosts.switch, "link", "add", bridge, "type", "bridge")
            run("ip", "-n", hosts.switch, "link", "set", bridge, "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            for network in range(num_networks):
                _plug_in(hosts, host, network, mtu)
        yield hosts


@contextlib.contextmanager
def _removed_at_the_end(*names: str) -> Iterator[None]:
    """Remove namespaces when the block ends, or this process does."""
    # A session of its own: Ctrl-C at the terminal does not reach it.
    keeper = subprocess.Popen(
        ["sh", "-c", REMOVE, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        keeper.stdin.close()
        keeper.wait(COMMAND_TIMEOUT_S)


def _plug_in(hosts: Hosts, host: int, network: int, mtu: int) -> None:
    """Give a host a card in one of the networks."""
    name, switch = hosts.names[host], hosts.switch
    device, peer = f"eth{network}", f"p{network}x{host}"
    run(
        *("ip", "link", "add", device, "netns", name, "type", "veth"),
        *("peer", "name", peer, "netns", switch),
    )
    run("ip", "-n", switch, "link", "set", peer, "mtu", str(mtu))
    run("ip", "-n", switch, "link", "set", peer, "master", f"br{network}", "up")
    run("ip", "-n", name, "link", "set", device, "mtu", str(mtu))
    address = hosts.address(host, network)
    # Without the check for duplicates an IPv6 address serves at once.
    given = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
    run("ip", "-n", name, "addr", "add", given[0], "dev", device, *given[1:])
    run("ip", "-n", name, "link", "set", device, "up")
    for space, card in ((name, device), (switch, peer)):
        for offload in OFFLOADS:
            with contextlib.suppress(TailboundError):  # not every kernel knows all
                run("ip", "netns", "exec", space, "ethtool", "-K", card, offload, "off")

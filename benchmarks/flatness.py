"""Does a job's step time stay flat when cross traffic makes the network's tail longer?

    sudo python benchmarks/flatness.py --out benchmarks/results/flatness.json

Ranks are hosts of their own (network namespaces) on one switch, whose ports are slow
(``tbf``) and have short queues. Another host sends bursts of UDP to all of them at
random times. First the bursts' length is chosen so that a probe, a TCP transfer of
100 KB from host to host, has p99/p50 near 1.5, and then near 3. Under both, a job runs
its steps over tailbound and over Gloo in turns: the compute part is a pause of fixed
length, so that two cores carry it, the exchange is real.

The question is by how much the mean step time grows from the first to the second.
"""

import argparse
import contextlib
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tailbound.config import LossBound, Transport
from tailbound.lab.hosts import Hosts, make_hosts, run
from tailbound.lab.machine import versions
from tailbound.training.rendezvous import mesh_over

PROBE_BYTES = 100_000
PROBES = 300
PROBE_PORT, NOISE_PORT = 4000, 4001
RATIOS = (1.5, 3.0)
BURSTS_MS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15)
SPACING_S = 0.1
"""Mean time between two bursts."""
DATAGRAM = bytes(1400)


# -- roles, each a process on a host ---------------------------------------------------


def be_noise(targets: list[str], rate_bits: float, seed: int) -> None:
    """Send bursts; a line on stdin is the length of those from now on, in ms."""
    rng = random.Random(seed)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    gap_s = 8 * len(DATAGRAM) / rate_bits
    for line in sys.stdin:
        burst_s = 1e-3 * float(line)
        print("on", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            time.sleep(rng.expovariate(1.0 / SPACING_S))
            due_s = begun_s = time.monotonic()
            while due_s < begun_s + burst_s:
                if time.monotonic() >= due_s:
                    for target in targets:
                        with contextlib.suppress(OSError):  # refused, or queue full
                            sender.sendto(DATAGRAM, (target, NOISE_PORT))
                    due_s += gap_s


def be_sink() -> None:
    """Take in the bursts, so that no host answers that nobody listens."""
    taker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taker.bind(("0.0.0.0", NOISE_PORT))
    print("on", flush=True)
    sys.stdin.read()


def be_probe_server() -> None:
    with socket.create_server(("0.0.0.0", PROBE_PORT)) as listener:
        print("on", flush=True)
        connection, _ = listener.accept()
        left = PROBE_BYTES
        while data := connection.recv(65536):
            left -= len(data)
            if left == 0:
                connection.send(b"!")
                left = PROBE_BYTES


def be_probe(target: str) -> None:
    """Time transfers; a line on stdin asks for a series, the answer is JSON, in ms."""
    data = bytes(PROBE_BYTES)
    with socket.create_connection((target, PROBE_PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in sys.stdin:
            times_ms = []
            for _ in range(PROBES):
                begun_s = time.perf_counter()
                connection.sendall(data)
                connection.recv(1)
                times_ms.append(1e3 * (time.perf_counter() - begun_s))
                time.sleep(0.005)
            print(json.dumps(times_ms), flush=True)


def be_rank(rank: int, world: int, store: str, num: int, compute_s: float) -> None:
    """Run steps; a line ``SIDE STEPS`` on stdin, the answer is JSON, in ms."""
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, world)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("gloo", meeting), rank=rank, world_size=world
    )
    bound, transport = LossBound(), Transport(bind="eth0")
    mesh = mesh_over(
        dist.PrefixStore("mesh", meeting), "mesh", rank, world, bound, transport
    )
    values = torch.ones(num)
    print("on", flush=True)
    for line in sys.stdin:
        side, steps = line.split()
        times_ms = []
        for _ in range(int(steps)):
            begun_s = time.perf_counter()
            time.sleep(compute_s)
            values.fill_(1.0)
            if side == "gloo":
                dist.all_reduce(values)
            else:
                mesh.all_reduce(values.numpy(), 1.0)
            times_ms.append(1e3 * (time.perf_counter() - begun_s))
        print(json.dumps(times_ms), flush=True)
    mesh.close()
    dist.destroy_process_group()


# -- the measurement -----------------------------------------------------------------


class Role:
    """A process on a host that answers lines with lines."""

    def __init__(self, hosts: Hosts, host: int, *words: object) -> None:
        script = [sys.executable, __file__, *map(str, words)]
        self._process = subprocess.Popen(
            hosts.command(host, "env", "GLOO_SOCKET_IFNAME=eth0", *script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: object) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended")
        return line

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def role(hosts: Hosts, host: int, *words: object) -> Iterator[Role]:
    process = Role(hosts, host, *words)
    try:
        yield process
    finally:
        process.end()


def shape(hosts: Hosts, num: int, mbit: float, queue_ms: float) -> None:
    """Make the switch's ports slow, towards every host."""
    for host in range(num):
        run(
            *("ip", "netns", "exec", hosts.switch, "tc", "qdisc", "add", "dev"),
            *(f"p0x{host}", "root", "tbf", "rate", f"{mbit}mbit", "burst", "16kb"),
            *("latency", f"{queue_ms}ms"),
        )


def tail_ratio(times_ms: list[float]) -> float:
    p50, p99 = np.percentile(times_ms, (50, 99))
    return float(p99 / p50)


def calibrate(noise: Role, probe: Role) -> list[dict[str, float]]:
    """The bursts whose tail ratios are nearest to those that are wanted."""
    found = []
    for burst_ms in BURSTS_MS:
        noise.say(burst_ms)
        noise.hear()
        probe.say("go")
        times_ms = json.loads(probe.hear())
        p50, p99 = np.percentile(times_ms, (50, 99))
        found.append(
            {
                "burst_ms": burst_ms,
                "p50_ms": round(float(p50), 2),
                "p99_ms": round(float(p99), 2),
                "ratio": round(float(p99 / p50), 2),
            }
        )
        print(found[-1], flush=True)
    return [min(found, key=lambda one: abs(one["ratio"] - want)) for want in RATIOS]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    world, num = args.world, args.elements
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(make_hosts(world + 1))
        shape(hosts, world, args.mbit, args.queue_ms)
        for host in range(world):
            stack.enter_context(role(hosts, host, "sink")).hear()
        addresses = [hosts.address(host) for host in range(world)]
        noise = stack.enter_context(
            role(hosts, world, "noise", 2e6 * args.mbit, args.seed, *addresses)
        )
        with role(hosts, 1, "probe-server") as server:
            server.hear()
            with role(hosts, 0, "probe", addresses[1]) as probe:
                networks = calibrate(noise, probe)
        store = stack.enter_context(tempfile.TemporaryDirectory()) + "/store"
        ranks = [
            stack.enter_context(
                role(hosts, r, "rank", r, world, store, num, 1e-3 * args.compute_ms)
            )
            for r in range(world)
        ]
        for one in ranks:
            one.hear()
        times: dict[str, list[list[float]]] = {
            side: [[], []] for side in ("tailbound", "gloo")
        }
        for turn in range(-1, args.turns):  # the first is a warm-up
            for which, network in enumerate(networks):
                noise.say(network["burst_ms"])
                noise.hear()
                for side, kept in times.items():
                    for one in ranks:
                        one.say(f"{side} {args.steps}")
                    heard = [json.loads(one.hear()) for one in ranks]
                    if turn >= 0:
                        kept[which] += heard[0]
            print(f"turn {turn + 1} of {args.turns}", flush=True)
    return {"networks": networks, "sides": {s: summary(*t) for s, t in times.items()}}


def summary(calm_ms: list[float], rough_ms: list[float]) -> dict[str, Any]:
    def numbers(times_ms: list[float]) -> dict[str, float]:
        p50, p99 = np.percentile(times_ms, (50, 99))
        mean = statistics.fmean(times_ms)
        found = {"mean_ms": mean, "p50_ms": p50, "p99_ms": p99, "max_ms": max(times_ms)}
        return {name: round(float(value), 2) for name, value in found.items()}

    calm, rough = numbers(calm_ms), numbers(rough_ms)
    change = 100.0 * (rough["mean_ms"] / calm["mean_ms"] - 1.0)
    return {"calm": calm, "rough": rough, "change_percent": round(change, 2)}


def main() -> None:
    roles = {
        "noise": lambda rate, seed, *targets: be_noise(
            list(targets), float(rate), int(seed)
        ),
        "sink": be_sink,
        "probe-server": be_probe_server,
        "probe": be_probe,
        "rank": lambda rank, world, store, num, compute_s: be_rank(
            int(rank), int(world), store, int(num), float(compute_s)
        ),
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--elements", type=int, default=1 << 17, help="float32")
    parser.add_argument("--mbit", type=float, default=200.0, help="of a switch's port")
    parser.add_argument("--queue-ms", type=float, default=10.0)
    parser.add_argument("--compute-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=60, help="of one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args)
    for side, found in result["sides"].items():
        print(side, json.dumps(found))
    if args.out is not None:
        record = {
            "question": "step time when cross traffic doubles the network's tail ratio",
            "configuration": {k: v for k, v in vars(args).items() if k != "out"},
            "versions": versions(),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            **result,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

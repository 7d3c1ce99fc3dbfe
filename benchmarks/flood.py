"""What a flood of datagrams does to a running job: to its results, and to its rounds.

    python benchmarks/flood.py --millions 10

One worker and its server on loopback. In each turn the job runs beside nothing, then
beside a flood to a port of somebody else, then beside the same to the server's port.
The middle one is the flood's share of the CPU; what the last one adds to it is what the
datagrams cost us. Kinds (needs root, for copies of real datagrams):

    garbage     random bytes
    forged      the job's real headers around random data, from another port
    replayed    the job's own datagrams once more, from the worker's own address
"""

import argparse
import itertools
import multiprocessing as mp
import os
import random
import socket
import statistics
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from recording import write_record

from tailbound.config import LossBound, Transport
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.wire import HEADER_BYTES
from tailbound.transport.batching import segment_ancillary
from tailbound.transport.group import Group, Server

MTU = 1500
SEGMENT = MTU - 28
KINDS = ("garbage", "forged", "replayed")
BATCH = 44
"""Datagrams of a call: 64 KiB."""


def serve(conn: Any) -> None:
    server = Server(1, transport=Transport(mtu=MTU, timeout_s=120.0))
    conn.send(server.address)
    thread = threading.Thread(target=server.run)
    thread.start()
    conn.recv()
    (conduit,) = server.station.conduits.values()
    conn.send(conduit.udp.address[1])
    thread.join()
    counters = server.endpoint.counters()
    conn.send(
        {
            "foreign": counters.foreign,
            "stale": counters.stale,
            "malformed": counters.malformed,
            "overflow": conduit.udp.statistics().overflow,
        }
    )


def work(conn: Any, address: str, num: int) -> None:
    """Rounds until told to stop; says of each whether its mean was exact."""
    group = Group(
        address,
        rank=0,
        world_size=1,
        buckets=(BucketSpec("float32", ("gradient",), ((num,),)),),
        bound=LossBound.fixed(0.0),
        transport=Transport(mtu=MTU, timeout_s=120.0),
    )
    conn.send("joined")
    rounds = 0
    while not conn.poll():
        rounds += 1
        values = np.full(num, float(rounds), np.float32)
        group.all_reduce(values, 1.0)
        conn.send(bool((values == float(rounds)).all()))
    group.close()


def capture(port: int, num: int) -> tuple[int, list[bytes]]:
    """Datagrams that go to this port; and the port that they come from."""
    seen: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        while len(seen) < num:
            packet = raw.recv(65535)
            udp = packet[(packet[0] & 15) * 4 :]
            source, target = struct.unpack_from("!2H", udp)
            if target != port:
                continue
            worker, data = source, udp[8:]  # several, where the kernel joined them
            seen += [data[at : at + SEGMENT] for at in range(0, len(data), SEGMENT)]
    return worker, [datagram for datagram in seen if len(datagram) == SEGMENT]


def flood(conn: Any, worker: int, seen: list[bytes], seed: int) -> None:
    """Send what is ordered, until told to stop."""
    rng = random.Random(seed)
    batches = {
        "garbage": rng.randbytes(BATCH * SEGMENT),
        "forged": b"".join(
            datagram[:HEADER_BYTES] + rng.randbytes(SEGMENT - HEADER_BYTES)
            for datagram in rng.choices(seen, k=BATCH)
        ),
    }
    ancillary = segment_ancillary(SEGMENT)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # it gets copies, unread
    while (order := conn.recv()) is not None:
        kind, target, num = order
        header = struct.pack("!4H", worker, target, 8 + SEGMENT, 0)
        replayed = [header + datagram for datagram in rng.choices(seen, k=BATCH)]
        begun = time.perf_counter()
        for _ in range(-(-num // BATCH)):
            if kind == "replayed":
                for datagram in replayed:
                    raw.sendto(datagram, ("127.0.0.1", 0))
            else:
                sender.sendmsg([batches[kind]], ancillary, 0, ("127.0.0.1", target))
        conn.send(time.perf_counter() - begun)


def rounds_of(conn: Any) -> int:
    """Since the last call; the mean of every one must have been exact."""
    rounds = 0
    while conn.poll():
        assert conn.recv(), "a result was changed"
        rounds += 1
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=10.0)
    parser.add_argument("--mbytes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root: it copies datagrams from a raw socket")
    server_near, server_far = mp.Pipe()
    server = mp.Process(target=serve, args=(server_far,))
    server.start()
    near, far = mp.Pipe()
    num = options.mbytes * 1_000_000 // 4
    worker = mp.Process(target=work, args=(far, server_near.recv(), num))
    worker.start()
    near.recv()
    server_near.send("where?")
    port = server_near.recv()
    worker_port, seen = capture(port, 2000)
    elsewhere = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    elsewhere.bind(("127.0.0.1", 0))
    flood_near, flood_far = mp.Pipe()
    args = (flood_far, worker_port, seen, options.seed)
    flooder = mp.Process(target=flood, args=args)
    flooder.start()
    each = int(options.millions * 1e6 / options.repeats / len(KINDS)) + 1
    turns: list[dict[str, Any]] = []
    for repeat, kind in itertools.product(range(options.repeats), KINDS):
        for where in ("nothing", "elsewhere", "server"):
            rounds_of(near)
            seconds = 2.0
            if where == "nothing":
                time.sleep(seconds)
            else:
                target = port if where == "server" else elsewhere.getsockname()[1]
                flood_near.send((kind, target, each))
                seconds = flood_near.recv()
            rounds = rounds_of(near)
            turn = {
                "repeat": repeat,
                "kind": kind,
                "where": where,
                "rounds": rounds,
                "seconds": seconds,
                "round_ms": seconds * 1e3 / max(rounds, 0.5),
                "million_per_s": 0.0 if where == "nothing" else each / seconds / 1e6,
            }
            turns.append(turn)
            print(
                f"{repeat} {kind:8} {where:9}: {turn['round_ms']:.1f} ms a round, "
                f"{turn['million_per_s']:.2f} million datagrams a second"
            )
    flood_near.send(None)
    near.send("close")
    counted = server_near.recv()
    for process in (flooder, worker, server):
        process.join()

    def ratio(kind: str, above: str, below: str) -> float:
        found = {
            (turn["repeat"], turn["where"]): turn["round_ms"]
            for turn in turns
            if turn["kind"] == kind
        }
        return statistics.median(
            found[repeat, above] / found[repeat, below]
            for repeat in range(options.repeats)
        )

    ratios = {}
    for kind in KINDS:
        ratios[kind] = {
            "elsewhere_over_nothing": ratio(kind, "elsewhere", "nothing"),
            "server_over_elsewhere": ratio(kind, "server", "elsewhere"),
        }
        print(f"{kind}: {ratios[kind]}")
    total = each * len(KINDS) * options.repeats
    print(f"{total} datagrams to the server, every mean exact; it counted {counted}")
    if options.out is not None:
        write_record(
            options.out,
            "flood",
            options,
            turns=turns,
            datagrams_to_the_server=total,
            counted=counted,
            median_ratio=ratios,
        )


if __name__ == "__main__":
    main()

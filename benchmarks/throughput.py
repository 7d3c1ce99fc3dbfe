"""Throughput of the server plan on loopback, beside the kernel's own batched UDP.

    python benchmarks/throughput.py --mbytes 100 --workers 1 --rounds 10
    python benchmarks/throughput.py --workers 3 --out benchmarks/results/x.json
    python benchmarks/throughput.py --security session authenticated encrypted

Each repeat measures the kernel first (UDP_SEGMENT and UDP_GRO between two processes,
nothing else done with the bytes) and then tailbound, so that the ratio holds on a
machine whose speed drifts. CPU is user plus system time of both ends over the bytes of
both ways; it includes the mean, its norm and all that a real round does.
"""

import argparse
import itertools
import multiprocessing as mp
import os
import statistics
import struct
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from recording import write_record

from tailbound.config import LossBound, Security, Transport
from tailbound.protocol.messages import BucketSpec
from tailbound.transport.group import Group, Server

SECRET = "of this benchmark alone"
SOL_UDP, UDP_SEGMENT, UDP_GRO, SO_RCVBUFFORCE = 17, 103, 104, 33


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def cpu_of_s(pid: int) -> float:
    """User and system time of another process so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raw_receiver(conn: Any, num_bytes: int) -> None:
    import socket

    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(SOL_UDP, UDP_GRO, 1)
    receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    receiver.bind(("127.0.0.1", 0))
    receiver.settimeout(0.5)
    conn.send(receiver.getsockname())
    buffer = bytearray(65536)
    received, first_s, last_s = 0, None, 0.0
    begun = cpu_s()
    try:
        while received < num_bytes:
            got, _, _, _ = receiver.recvmsg_into([buffer], 64)
            last_s = time.perf_counter()
            first_s = first_s or last_s
            received += got
    except TimeoutError:
        pass  # the kernel dropped some: nothing repairs them here
    spent_s = last_s - (first_s or last_s)
    conn.send((received, spent_s, cpu_s() - begun))


def raw_pump(num_bytes: int, datagram_bytes: int) -> dict[str, float]:
    """Bytes per second and CPU of the bare kernel path."""
    import socket

    ours, theirs = mp.Pipe()
    process = mp.Process(target=raw_receiver, args=(theirs, num_bytes))
    process.start()
    address = ours.recv()
    batch = bytes(65507 // datagram_bytes * datagram_bytes)
    ancillary = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", datagram_bytes))]
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    begun = cpu_s()
    for _ in range(-(-num_bytes // len(batch))):
        sender.sendmsg([batch], ancillary, 0, address)
    spent = cpu_s() - begun
    received, seconds, receiver_cpu_s = ours.recv()
    process.join()
    sender.close()
    return {
        "gb_per_s": received / seconds / 1e9,
        "cpu_ms_per_mb": (spent + receiver_cpu_s) * 1e3 / (num_bytes / 1e6),
        "lost_share": max(0.0, 1.0 - received / num_bytes),
    }


def serve(conn: Any, workers: int, mtu: int, security: str) -> None:
    server = Server(workers, transport=make_transport(mtu, security))
    conn.send(server.address)
    server.run()
    overflow = sum(
        conduit.udp.statistics().overflow
        for conduit in server.station.conduits.values()
    )
    conn.send(overflow)


def make_transport(mtu: int, security: str) -> Transport:
    level = cast(Security, security)
    return Transport(mtu=mtu, timeout_s=60.0, security=level, secret=SECRET)


def work(
    conn: Any, rank: int, options: argparse.Namespace, address: str, security: str
) -> None:
    num = options.mbytes * 1_000_000 // 4
    group = Group(
        address,
        rank=rank,
        world_size=options.workers,
        buckets=(BucketSpec("float32", ("gradient",), ((num,),)),),
        bound=LossBound.fixed(0.0),
        transport=make_transport(options.mtu, security),
    )
    grad_N = np.random.default_rng(options.seed + rank).standard_normal(num, np.float32)
    group.all_reduce(grad_N, 1.0)  # touches all memory once
    conn.send("warm")
    conn.recv()
    rounds = []
    begun = cpu_s()
    for _ in range(options.rounds):
        reduced = group.all_reduce(grad_N, 1.0)
        way_in, way_back = reduced.reports
        rounds.append(
            {
                "in_s": way_in.latency_s,
                "back_s": way_back.latency_s,
                "sent": way_in.sent,
                "retransmitted": way_in.retransmitted,
            }
        )
    conn.send({"rounds": rounds, "cpu_s": cpu_s() - begun})
    conn.recv()
    group.close()


def tailbound_push(options: argparse.Namespace, security: str) -> dict[str, float]:
    """One job: its rounds' throughput, repairs and CPU."""
    ours, theirs = mp.Pipe()
    args = (theirs, options.workers, options.mtu, security)
    server = mp.Process(target=serve, args=args)
    server.start()
    address = ours.recv()
    pipes, processes = [], []
    for rank in range(options.workers):
        near, far = mp.Pipe()
        process = mp.Process(target=work, args=(far, rank, options, address, security))
        process.start()
        pipes.append(near)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    assert server.pid is not None
    server_cpu_s = -cpu_of_s(server.pid)  # after the first round, which touches memory
    for pipe in pipes:
        pipe.send("go")
    answers = [pipe.recv() for pipe in pipes]
    server_cpu_s += cpu_of_s(server.pid)
    for pipe in pipes:
        pipe.send("close")
    overflow = ours.recv()
    for process in (*processes, server):
        process.join()
    rounds = [entry for answer in answers for entry in answer["rounds"]]
    moved_mb = 2.0 * options.mbytes * options.workers * options.rounds
    worker_cpu_s = sum(answer["cpu_s"] for answer in answers)
    gb = options.mbytes / 1e3
    return {
        "in_gb_per_s": gb / statistics.median(entry["in_s"] for entry in rounds),
        "in_best_gb_per_s": gb / min(entry["in_s"] for entry in rounds),
        "back_gb_per_s": gb / statistics.median(entry["back_s"] for entry in rounds),
        "retransmitted_share": sum(entry["retransmitted"] for entry in rounds)
        / sum(entry["sent"] for entry in rounds),
        "worker_cpu_ms_per_mb": worker_cpu_s * 1e3 / moved_mb,
        "server_cpu_ms_per_mb": server_cpu_s * 1e3 / moved_mb,
        "cpu_ms_per_mb": (worker_cpu_s + server_cpu_s) * 1e3 / moved_mb,
        "overflow": float(overflow),
    }


def median_ratio(pairs: list[dict[str, Any]], security: str) -> dict[str, float]:
    """Ours over the kernel's at one level."""
    ours = [pair for pair in pairs if pair["security"] == security]

    def ratio(above: str, below: str) -> float:
        return statistics.median(p["tailbound"][above] / p["raw"][below] for p in ours)

    return {
        "throughput": ratio("in_gb_per_s", "gb_per_s"),
        "cpu": ratio("cpu_ms_per_mb", "cpu_ms_per_mb"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--security", nargs="+", default=["session"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = []
    for repeat, security in itertools.product(range(options.repeats), options.security):
        raw = raw_pump(options.mbytes * 4_000_000, options.mtu - 28)
        ours = tailbound_push(options, security)
        pairs.append({"security": security, "raw": raw, "tailbound": ours})
        print(
            f"{repeat} {security}: kernel {raw['gb_per_s']:.2f} GB/s, "
            f"{raw['cpu_ms_per_mb']:.2f} CPU-ms/MB; tailbound in "
            f"{ours['in_gb_per_s']:.2f} (best {ours['in_best_gb_per_s']:.2f}) back "
            f"{ours['back_gb_per_s']:.2f} GB/s, {ours['cpu_ms_per_mb']:.2f} CPU-ms/MB, "
            f"repairs {ours['retransmitted_share']:.2%}, "
            f"overflow {ours['overflow']:.0f}"
        )
    ratios = {}
    for security in options.security:
        ratio = ratios[security] = median_ratio(pairs, security)
        print(
            f"{security}, tailbound over kernel: throughput {ratio['throughput']:.2f}, "
            f"CPU {ratio['cpu']:.1f}"
        )
    if options.out is not None:
        median = ratios if len(ratios) > 1 else ratios[options.security[0]]
        write_record(
            options.out, "throughput", options, pairs=pairs, median_ratio=median
        )


if __name__ == "__main__":
    main()

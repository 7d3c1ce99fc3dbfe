"""Copies of what a burst lost (``repair="burst"``) beside plain repair: real sockets.

    python benchmarks/repair.py --out benchmarks/results/repair.json

One worker and its server on loopback; losses and delays stand in the receiving path. Of
the rounds every tenth is a burst of 70 %, the others lose 2 %. For each round-trip time
and loss bound the two repairs take turns, and a burst round's sends, datagrams and time
are compared (docs/design/0035).
"""

import argparse
import itertools
import multiprocessing as mp
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from recording import write_record

from tailbound.config import LossBound, Repairing, Transport
from tailbound.impairments import BurstLoss, Impairments, IndependentLoss
from tailbound.protocol.messages import BucketSpec
from tailbound.transport.group import Group, Server

MTU = 1500
USUAL_LOSS, BURST_LOSS = 0.02, 0.7
RTT_MS = (0.1, 1.0, 20.0)
BOUNDS = (0.0, 0.008, 0.408)
REPAIRS: tuple[Repairing, Repairing] = ("plain", "burst")


def bursts_of(rounds: int) -> tuple[int, ...]:
    return tuple(range(10, rounds + 1, 10))


def serve(conn: Any, rtt_ms: float, rounds: int, seed: int) -> None:
    losses = (
        IndependentLoss(rate=USUAL_LOSS),
        BurstLoss(rate=BURST_LOSS, rounds=bursts_of(rounds)),
    )
    impaired = Impairments(losses=losses, delay_s=rtt_ms / 2e3, seed=seed)
    server = Server(1, transport=Transport(mtu=MTU, impairments=impaired))
    conn.send(server.address)
    server.run()


def work(
    conn: Any, address: str, bound: LossBound, rtt_ms: float, rounds: int, num: int
) -> None:
    group = Group(
        address,
        rank=0,
        world_size=1,
        buckets=(BucketSpec("float32", ("gradient",), ((num,),)),),
        bound=bound,
        transport=Transport(
            mtu=MTU, impairments=Impairments(delay_s=rtt_ms / 2e3, seed=1)
        ),
    )
    found = []
    for counter in range(1, rounds + 1):
        reduced = group.all_reduce(np.ones(num, np.float32), 1.0)
        way_in = reduced.reports[0]
        if counter in bursts_of(rounds):
            found.append(
                {
                    "sends": way_in.sends,
                    "datagrams": way_in.sent,
                    "latency_ms": way_in.latency_s * 1e3,
                    "missing_share": way_in.missing / way_in.num_chunks,
                }
            )
    group.close()
    conn.send(found)


def run_job(
    repair: Repairing, p: float, rtt_ms: float, options: argparse.Namespace, seed: int
) -> list[dict[str, float]]:
    """The burst rounds of one job."""
    near, far = mp.Pipe()
    args = (far, rtt_ms, options.rounds, seed)
    server = mp.Process(target=serve, args=args)
    server.start()
    address = near.recv()
    bound = LossBound(p_low=p, p_high=p, repair=repair)
    num = options.mbytes * 1_000_000 // 4
    rank = (far, address, bound, rtt_ms, options.rounds, num)
    worker = mp.Process(target=work, args=rank)
    worker.start()
    found: list[dict[str, float]] = near.recv()
    worker.join()
    server.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbytes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for rtt_ms, p in itertools.product(RTT_MS, BOUNDS):
        rounds: dict[Repairing, list[dict[str, float]]] = {"plain": [], "burst": []}
        for repeat, repair in itertools.product(range(options.repeats), REPAIRS):
            seed = options.seed + repeat
            rounds[repair] += run_job(repair, p, rtt_ms, options, seed)
        row: dict[str, float] = {"rtt_ms": rtt_ms, "p": p}
        for repair in REPAIRS:
            for key in rounds[repair][0]:
                values = [found[key] for found in rounds[repair]]
                row[f"{repair}_{key}"] = statistics.mean(values)
        row["faster"] = row["plain_latency_ms"] / row["burst_latency_ms"]
        row["datagrams_over_plain"] = row["burst_datagrams"] / row["plain_datagrams"]
        rows.append(row)
        print(
            f"RTT {rtt_ms:4.1f} ms, p {p:5.3f}: sends {row['plain_sends']:.1f} to "
            f"{row['burst_sends']:.1f}, {row['plain_latency_ms']:.1f} to "
            f"{row['burst_latency_ms']:.1f} ms ({row['faster']:.2f} times as fast), "
            f"{row['datagrams_over_plain']:.2f} times the datagrams"
        )
    if options.out is not None:
        conditions = {"usual_loss": USUAL_LOSS, "burst_loss": BURST_LOSS, "mtu": MTU}
        write_record(options.out, "repair", options, conditions=conditions, rows=rows)


if __name__ == "__main__":
    main()

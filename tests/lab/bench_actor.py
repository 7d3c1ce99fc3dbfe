"""A program that plays a rank of the benchmark: ``bench_actor.py PART``.

Parts: ``good``; ``wrong`` (rank 1 has another result than the known one, and reports
nothing missing); ``apart`` (chunks are missing, and rank 1 has other bytes); ``lossy``;
``broken``, ``dead``, ``silent`` and ``confused`` are what rank 1 does when ordered to
reduce: it says that it failed, is killed, says nothing, or answers something else;
``absent`` ends when it is to join.
"""

import json
import os
import signal
import sys
import time


def say(kind: str, **answer: object) -> None:
    print(json.dumps({"kind": kind, **answer}), flush=True)


def reduce(part: str, rank: int, side: str) -> None:
    if rank == 1:
        if part == "broken":
            say("broken", message="lost rank 0 during an all-reduce")
            sys.exit(1)
        if part == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if part == "silent":
            time.sleep(60.0)
        if part == "confused":
            say("ready", address="")
    # Rank 1 is the slowest, and Gloo twice as slow.
    say("finished", latency_s=(0.010 + 0.005 * rank) * (2 if side == "gloo" else 1))


def settle(part: str, rank: int, side: str) -> None:
    is_lossy = side == "tailbound" and part in ("apart", "lossy")
    say(
        "settled",
        user_s=0.002 if side == "gloo" else 0.006,
        system_s=0.004,
        wire_bytes=1_500_000,
        digest=str(rank) if part == "apart" else "same",
        is_exact=not is_lossy and not (part == "wrong" and rank == 1),
        p=0.408 if is_lossy else 0.0,
        missing=2 if is_lossy else 0,
        chunks=10 if side == "tailbound" else 0,
    )


def main(part: str) -> None:
    rank, side = 0, ""
    for line in sys.stdin:
        order = json.loads(line)
        if order["type"] == "host":
            say("listening", port=7000)
        elif order["type"] == "join":
            rank = order["rank"]
            assert order["store_port"] == 7000
            if part == "absent" and rank == 1:
                sys.exit("no interface eth0")
            assert os.environ["GLOO_SOCKET_IFNAME"] == order["device"]
            say("ready")
        elif order["type"] == "prepare":
            say("ready")
        elif order["type"] == "go":
            side = order["side"]
            reduce(part, rank, side)
        else:
            settle(part, rank, side)


if __name__ == "__main__":
    main(sys.argv[1])

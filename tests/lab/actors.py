"""Programs that play the demo's processes without training: ``actors.py ROLE PART``.

Parts of a worker: ``good``, ``broken`` (says so), ``dead`` (kills itself when ordered),
``silent`` (takes the order and says nothing). A server's order tells it its part by the
run's name: ``deaf`` dies of it.
"""

import json
import os
import signal
import sys
import time


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def step(rank: int) -> dict[str, object]:
    return {
        "kind": "step",
        "run": "fixed",
        "rank": rank,
        "step": 1,
        "weight": 1.0,
        "total_weight": 2.0,
        "skipped": False,
        "compute_s": 0.0,
        "exchange_s": 0.0,
        "p": 0.0,
        "critical": True,
        "norm": 1.0,
        "ratio": None,
        "verdict": "",
        "missing_share": 0.0,
        "loss": None,
    }


def epoch(rank: int, server: str) -> dict[str, object]:
    """The digest tells the test where we were sent, and as what."""
    return {
        "kind": "epoch",
        "run": "fixed",
        "rank": rank,
        "epoch": 1,
        "step": 1,
        "metric": 0.5,
        "metric_name": "accuracy",
        "train_s": 1.0,
        "digest": f"{server} {os.environ['WORLD_SIZE']}",
    }


def serve(part: str) -> None:
    for line in sys.stdin:
        if json.loads(line)["run"] == "deaf":
            os.kill(os.getpid(), signal.SIGKILL)
        say(kind="ready", address="127.0.0.1:7000")
        if part == "broken":
            say(kind="broken", message="lost rank 1")
            sys.exit(1)
        say(kind="done")


def work(part: str) -> None:
    rank = int(os.environ["RANK"])
    if part != "silent":
        say(kind="ready")
    for line in sys.stdin:
        if part == "dead" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if part == "broken" and rank == 1:
            say(kind="broken", message="lost the server")
            sys.exit(1)
        say(**step(rank))
        say(**epoch(rank, json.loads(line)["server"]))
        if part == "stuck":
            time.sleep(60.0)
        say(kind="done")


if __name__ == "__main__":
    (serve if sys.argv[1] == "server" else work)(sys.argv[2])

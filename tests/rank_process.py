"""One rank as a process of its own, for tests that kill, stop or fork it.

Run as ``python tests/rank_process.py JSON``; see ``Plan``. What happens is said on
standard output, one line each: ``server HOST:PORT``, ``started``, ``round N MEAN``,
``child PID``, ``failed TYPE: MESSAGE``, ``threads NAMES``.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailbound.config import LossBound, Transport
from tailbound.errors import TailboundError
from tailbound.protocol.messages import BucketSpec
from tailbound.transport import links
from tailbound.transport.group import Group, Server
from tailbound.transport.udp import UdpSocket


@dataclass
class Plan:
    """What the process does."""

    rank: int
    world_size: int
    address: str = ""
    """Of the server; empty: host it here and say where."""
    port: int = 0
    """Of the server that is hosted here; 0: any."""
    rounds: int = 5
    num: int = 100_000
    timeout_s: float = 20.0
    pause_s: float = 0.0
    """Before each round."""
    act: str = ""
    """``exit``: before the first round; ``exit-midway``: when half of a round's
    datagrams are out; ``raise``: an error of the training's own in round 2;
    ``fork``: a child that sleeps, then rounds without end."""


def say(*words: object) -> None:
    print(*words, flush=True)


class ExitsMidway(UdpSocket):
    """Ends the process once half of the gradient has left."""

    limit_bytes = 0
    gone_bytes = 0

    def send_batch(self, batch: Any, segment_bytes: int, address: Any) -> int:
        sent = super().send_batch(batch, segment_bytes, address)
        self.gone_bytes += sent
        if self.gone_bytes >= self.limit_bytes:
            os._exit(1)
        return sent


def run(plan: Plan, group: Group) -> None:
    if plan.act == "exit":
        os._exit(1)
    if plan.act == "fork":
        child = os.fork()
        if not child:
            time.sleep(60.0)
            os._exit(0)
        say("child", child)
    for turn in range(1, plan.rounds + 1):
        time.sleep(plan.pause_s)
        if plan.act == "raise" and turn == 2:
            raise ValueError("the loss is NaN")
        values = np.full(plan.num, plan.rank + turn, np.float32)
        group.all_reduce(values, 1.0)
        say("round", turn, *np.unique(values))


def main(plan: Plan) -> int:
    if plan.act == "exit-midway":
        ExitsMidway.limit_bytes = plan.num * 4 // 2
        vars(links)["UdpSocket"] = ExitsMidway
    transport = Transport(mtu=1500, timeout_s=plan.timeout_s)
    server = None
    if not plan.address:
        server = Server(plan.world_size, port=plan.port, transport=transport)
        plan.address = server.address
        say("server", plan.address)
    group = None
    try:
        group = Group(
            plan.address,
            rank=plan.rank,
            world_size=plan.world_size,
            buckets=(BucketSpec("float32", ("w",), ((plan.num,),)),),
            bound=LossBound.fixed(0.0),
            transport=transport,
            server=server,
        )
        say("started")
        run(plan, group)
    except TailboundError as error:
        say(f"failed {type(error).__name__}: {error}")
        if group is not None:
            group.close()
        names = [t.name for t in threading.enumerate() if t.name != "MainThread"]
        say("threads", *names)
        return 1
    except BaseException as error:
        if group is not None:
            group.abort(f"{type(error).__name__}: {error}")
        raise
    group.close()
    return 0


if __name__ == "__main__":
    signal.alarm(60)  # whatever goes wrong, no test leaves a process behind
    sys.exit(main(Plan(**json.loads(sys.argv[1]))))

"""One process of the demo: ``python -m tailbound.lab.demo_process server|worker``.

Orders come as JSON lines on standard input, answers and records leave as JSON lines on
standard output. The end of standard input is the end of the process.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from tailbound.config import Transport
from tailbound.errors import TailboundError
from tailbound.lab.child_process import die_with_parent, take_stdout
from tailbound.lab.orders import (
    Answer,
    Broken,
    Done,
    Ready,
    Role,
    ServerOrder,
    WorkerOrder,
)
from tailbound.records import EpochReport
from tailbound.transport.group import Server

Say = Callable[[Answer], None]


def serve(order: ServerOrder, say: Say) -> None:
    """Run the server of one run."""
    conditions = order.conditions
    server = Server(
        order.world_size,
        transport=Transport(
            mtu=conditions.mtu,
            timeout_s=order.timeout_s,
            impairments=conditions.impairments(0),
        ),
        # They load the data first.
        join_timeout_s=2 * order.timeout_s,
    )
    say(Ready(server.address))
    rush_network()
    server.run()


def rush_network() -> None:
    """Let this thread, and those that it starts, run as soon as a packet is there.

    The demo's four machines share the cores of one; on machines of their own, computing
    on one would not keep another from answering a probe. Among equals the kernel may
    let a thread that computes go on to its next tick, 4 ms at 250 Hz, and even before a
    thread of no other wish than to idle. Real time is root's to ask for.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def yield_to_network(policy: int) -> None:
    """Let this thread, which computes, give way to those that carry datagrams.

    Args:
        policy: the kernel's number of one that no datagram waits for. SCHED_IDLE; for a
            thread that mostly sleeps SCHED_OTHER, or it would oversleep.
    """
    # Of this thread only; there is no way back, so it must not start the next run's.
    os.sched_setscheduler(0, policy, os.sched_param(0))


def train(order: WorkerOrder, say: Say) -> None:
    """Train one run: the loop that a user would write."""
    import numpy as np

    import tailbound
    from tailbound.lab.delay import Delay
    from tailbound.lab.tasks import load_task
    from tailbound.training.rendezvous import find_place

    place = find_place()
    conditions, slow = order.conditions, order.stragglers
    task = load_task(order.task, data=Path(order.data) if order.data else None)
    model = task.build_model(conditions.seed)
    optimizer = task.build_optimizer(model)
    delay = None
    if slow is not None:
        delay = Delay(
            model,
            base_s=slow.micro_batch_s,
            micro_batches=slow.micro_batches,
            rng=np.random.default_rng([conditions.seed, place.rank]),
        )
    transport = Transport(
        plan="server",
        server=order.server,
        mtu=conditions.mtu,
        timeout_s=order.timeout_s,
        impairments=conditions.impairments(1 + place.rank),
    )
    train_s = 0.0
    step = 0
    rush_network()  # the driver's thread is this one's child
    with tailbound.attach(
        model,
        optimizer,
        micro_batches=1 if slow is None else slow.micro_batches,
        compute=order.compute,
        network=order.bound,
        transport=transport,
        on_record=say,
        run=order.run,
    ) as job:
        yield_to_network(os.SCHED_IDLE if slow is None else os.SCHED_OTHER)
        for epoch in range(1, order.epochs + 1):
            begun_s = time.perf_counter()
            for batch in task.batches(
                epoch=epoch,
                rank=job.rank,
                world_size=job.world_size,
                batch_size=order.batch_size,
                seed=conditions.seed,
            ):
                if delay is not None:
                    delay.begin_step()
                for x, y in job.micro_batches(batch):
                    job.backward(task.loss(model(x), y))
                step = job.step().step
            train_s += time.perf_counter() - begun_s
            say(
                EpochReport(
                    run=order.run,
                    rank=job.rank,
                    epoch=epoch,
                    step=step,
                    metric=task.evaluate(model),
                    metric_name=task.metric_name,
                    train_s=train_s,
                    digest=job.check_replicas(),
                )
            )
        job.review()


def prepare_training() -> None:
    """Import now what the first step would import, so that Ready means ready."""
    import torch

    import tailbound.lab.delay
    import tailbound.lab.tasks
    import tailbound.training.attaching  # noqa: F401

    # One thread a worker: several workers share this machine's cores.
    torch.set_num_threads(1)
    # torch imports its compiler, for seconds, when a process makes an optimizer.
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def follow(orders: BinaryIO, role: Role, say: Say) -> int:
    """Follow orders until there are no more; the exit code."""
    if role == "worker":
        prepare_training()
        say(Ready())
    for line in orders:
        try:
            if role == "server":
                serve(msgspec.json.decode(line, type=ServerOrder), say)
            else:
                order = msgspec.json.decode(line, type=WorkerOrder)
                # A thread for each run, since yield_to_network has no way back.
                with ThreadPoolExecutor(1) as computing:
                    computing.submit(train, order, say).result()
        except (TailboundError, ValueError, OSError) as error:
            say(Broken(" ".join(str(error).split())))
            return 1
        say(Done())
    return 0


def main(role: Role) -> int:
    """Be one process of the demo."""
    die_with_parent()
    return follow(sys.stdin.buffer, role, take_stdout())


if __name__ == "__main__":
    # argparse would be one more import in every process; the launcher is the only user.
    if sys.argv[1:] not in (["server"], ["worker"]):
        sys.exit("usage: python -m tailbound.lab.demo_process server|worker")
    sys.exit(main("server" if sys.argv[1] == "server" else "worker"))

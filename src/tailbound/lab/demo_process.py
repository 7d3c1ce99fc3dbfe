"""One process of the demo: ``python -m tailbound.lab.demo_process server|worker``.

Orders come as JSON lines on standard input, answers and records leave as JSON lines on
standard output. The end of standard input is the end of the process.
"""

import ctypes
import signal
import sys
import time
from pathlib import Path

import msgspec

from tailbound.config import Transport
from tailbound.errors import TailboundError
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

_PR_SET_PDEATHSIG = 1


def say(answer: Answer) -> None:
    """Write one line to the launcher, at once."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def die_with_parent() -> None:
    """Ask the kernel to end this process when the launcher is gone, even by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(order: ServerOrder) -> None:
    """Run the server of one run."""
    conditions = order.conditions
    server = Server(
        order.world_size,
        transport=Transport(
            mtu=conditions.mtu,
            timeout_s=order.timeout_s,
            impairments=conditions.impairments(0),
        ),
    )
    say(Ready(server.address))
    server.run()


def train(order: WorkerOrder) -> None:
    """Train one run: the loop that a user would write."""
    import tailbound
    from tailbound.lab.tasks import load_task
    from tailbound.training.rendezvous import find_place

    place = find_place()
    conditions = order.conditions
    task = load_task(order.task, data=Path(order.data) if order.data else None)
    model = task.build_model(conditions.seed)
    optimizer = task.build_optimizer(model)
    transport = Transport(
        server=order.server,
        mtu=conditions.mtu,
        timeout_s=order.timeout_s,
        impairments=conditions.impairments(1 + place.rank),
    )
    train_s = 0.0
    step = 0
    with tailbound.attach(
        model,
        optimizer,
        network=order.bound,
        transport=transport,
        on_record=say,
        run=order.run,
    ) as job:
        for epoch in range(1, order.epochs + 1):
            begun_s = time.perf_counter()
            for batch in task.batches(
                epoch=epoch,
                rank=job.rank,
                world_size=job.world_size,
                batch_size=order.batch_size,
                seed=conditions.seed,
            ):
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


def main(role: Role) -> int:
    """Follow orders until there are no more."""
    die_with_parent()
    if role == "worker":
        import torch

        import tailbound.lab.tasks
        import tailbound.training.job  # noqa: F401 - so that Ready means ready

        # One thread a worker: several workers share this machine's cores.
        torch.set_num_threads(1)
        say(Ready())
    for line in sys.stdin.buffer:
        try:
            if role == "server":
                serve(msgspec.json.decode(line, type=ServerOrder))
            else:
                train(msgspec.json.decode(line, type=WorkerOrder))
        except (TailboundError, ValueError, OSError) as error:
            say(Broken(str(error)))
            return 1
        say(Done())
    return 0


if __name__ == "__main__":
    # argparse would be one more import in every process; the launcher is the only user.
    if sys.argv[1:] not in (["server"], ["worker"]):
        sys.exit("usage: python -m tailbound.lab.demo_process server|worker")
    sys.exit(main("server" if sys.argv[1] == "server" else "worker"))

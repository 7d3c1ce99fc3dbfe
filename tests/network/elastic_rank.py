"""One rank of a job that torchrun restarts; run as ``elastic_rank.py FOLDER``.

Twelve lossy steps, a checkpoint after every fifth. Rank 2 kills itself once, between
the two micro-batches of the eighth. What each rank saw is a line of JSON in a file of
its own: the steps it did with their loss bounds, and how it ended.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tailbound
from training.ranks import Vector, plain_sgd

STEPS, SAVE_EVERY, DIES_IN, SIZE = 12, 5, 7, 20_000
# Never critical after the first check, so that a regime that is lost shows at once.
BOUND = tailbound.LossBound(p_low=0.0, p_high=0.4, frequency=2, eta=1e9)


def main(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    saved, killed = folder / "checkpoint.pt", folder / "killed"
    told: dict[str, Any] = {"rank": rank, "p": {}, "error": None, "restarted": False}
    model = Vector(SIZE)
    optimizer = plain_sgd(model, 0.1)
    state = torch.load(saved, weights_only=True) if saved.exists() else None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    try:
        with tailbound.attach(
            model,
            optimizer,
            micro_batches=2,
            network=BOUND,
            transport=tailbound.Transport(
                mtu=1500,
                timeout_s=40.0,
                impairments=tailbound.Impairments(
                    losses=(tailbound.IndependentLoss(rate=0.05),), seed=rank
                ),
            ),
        ) as job:
            if state is not None:
                told["restarted"] = True
                job.load_state_dict(state["job"])
            while job.num_steps < STEPS:
                step = job.num_steps
                rng = torch.Generator().manual_seed(100 * step + rank)
                x = torch.randn(4, SIZE, generator=rng)
                for number, part in enumerate(job.micro_batches(x)):
                    if (rank, step, number) == (2, DIES_IN, 1) and not killed.exists():
                        killed.write_text(str(time.time()))
                        os.kill(os.getpid(), signal.SIGKILL)
                    job.backward(model(part))
                report = job.step()
                told["p"][report.step] = report.p
                if job.num_steps % SAVE_EVERY == 0:
                    kept = job.state_dict()
                    if rank == 0:
                        torch.save(
                            {
                                "model": model.state_dict(),
                                "optimizer": optimizer.state_dict(),
                                "job": kept,
                            },
                            saved,
                        )
            told["digest"] = job.check_replicas()
    except tailbound.TailboundError as error:
        after_s = time.time() - float(killed.read_text())
        told["error"] = [type(error).__name__, str(error), after_s]
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        print(json.dumps(told), file=file)
    return 0 if told["error"] is None else 1


if __name__ == "__main__":
    signal.alarm(150)  # whatever goes wrong, no test leaves a process behind
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))

"""Training that survives the loss of a rank: checkpoint, restart, go on.

    torchrun --nproc-per-node 3 --max-restarts 1 examples/elastic.py FOLDER [--kill]

With --kill rank 2 dies once, in the middle of step 25; the others name it and end,
torchrun starts all again, and they go on from the checkpoint in FOLDER.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tailbound

STEPS, SAVE_EVERY, KILL_AT = 60, 10, 25


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def main(folder: Path, kill: bool) -> None:
    torch.set_num_threads(1)
    path, killed = folder / "checkpoint.pt", folder / "killed"
    rank = int(os.environ.get("RANK", "0"))
    dies = kill and rank == 2 and not killed.exists()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    saved = torch.load(path, weights_only=True) if path.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    bound = tailbound.LossBound(p_low=0.008, p_high=0.408, window=5)
    with tailbound.attach(model, optimizer, micro_batches=2, network=bound) as job:
        if saved is not None:
            job.load_state_dict(saved["job"])
            if rank == 0:
                print(f"goes on after step {job.num_steps}")
        while job.num_steps < STEPS:
            step = job.num_steps
            rng = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(48, 64, generator=rng)
            for number, inputs in enumerate(job.micro_batches(x)):
                if dies and (step, number) == (KILL_AT, 1):
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                labels = inputs[:, :10].argmax(1)
                job.backward(nn.functional.cross_entropy(model(inputs), labels))
            report = job.step()
            if rank == 0 and report.step % SAVE_EVERY == 1:
                print(f"step {report.step}: loss {report.loss:.3f}, p {report.p:.1%}")
            if report.step % SAVE_EVERY == 0:
                state = job.state_dict()  # on all ranks, or on none
                if rank == 0:
                    parts = {"model": model, "optimizer": optimizer}
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save(path, {**states, "job": state})
        digest = job.check_replicas()
        if rank == 0:
            print(f"all {job.world_size} ranks hold the same parameters: {digest}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), kill="--kill" in sys.argv)
    except tailbound.TailboundError as error:
        sys.exit(f"rank {os.environ.get('RANK', '0')} ends: {error}")

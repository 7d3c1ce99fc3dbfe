"""Three ranks under both bounds; in each step one of them, by turns, is slow.

    torchrun --nproc-per-node 3 examples/both_bounds.py

The threshold is found from the first steps. What it was predicted to gain and what it
really gained are printed at the end.
"""

import os
import time

import torch
from torch import nn

import tailbound

STEPS, MICRO_BATCHES, BATCH = 80, 6, 48


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    rng = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tailbound.attach(
        model,
        optimizer,
        micro_batches=MICRO_BATCHES,
        compute=tailbound.ComputeBound(warmup_steps=3, calibration_steps=15),
        network=tailbound.LossBound(p_low=0.008, p_high=0.408, window=5),
        transport=tailbound.Transport(timeout_s=30.0),
    ) as job:
        for step in range(STEPS):
            x = torch.randn(BATCH, 64, generator=rng)
            y = x[:, :10].argmax(1)
            is_slow = step % job.world_size == job.rank
            for inputs, labels in job.micro_batches((x, y)):
                job.backward(nn.functional.cross_entropy(model(inputs), labels))
                time.sleep(0.008 if is_slow else 0.002)
            job.step()
        told = job.review()
        digest = job.check_replicas()
    if rank == 0 and told is not None:
        print(told.verdict)
        if told.calibration_step_s and told.realised_step_s:
            print(
                f"a step took {1e3 * told.calibration_step_s:.1f} ms before and "
                f"{1e3 * told.realised_step_s:.1f} ms since; each rank dropped "
                + ", ".join(f"{share:.0%}" for share in told.dropped_share_W)
            )
        print(f"all {job.world_size} ranks hold the same parameters: {digest}")


if __name__ == "__main__":
    main()

"""Record a trace in a plain PyTorch loop, then ask what a compute bound would gain.

    torchrun --nproc-per-node 2 examples/record_trace.py [FOLDER]
    tailbound plan traces

The numbered lines are tailbound's; the rest is any data-parallel training. Each rank
sleeps now and then, so that there is something to find. Needs no GPU.
"""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailbound import record_latencies  # 1

STEPS, MICRO_BATCHES = 25, 4


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    chance = random.Random(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = list(
        zip(
            torch.randn(MICRO_BATCHES, 32, 64),
            torch.randint(10, (MICRO_BATCHES, 32)),
            strict=True,
        )
    )

    path = f"{folder}/rank-{{rank}}.csv"  # 2
    with record_latencies(path, model=model) as recorder:  # 3
        for _ in range(STEPS):
            for x, y in recorder.micro_batches(batch):  # 4
                loss = nn.functional.cross_entropy(model(x), y)
                if chance.random() < 0.2:
                    time.sleep(0.01)
                (loss / MICRO_BATCHES).backward()
            recorder.end_step()  # 5
            optimizer.step()
            optimizer.zero_grad()

    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] if len(sys.argv) > 1 else "traces")

"""One rank of a real job, as a user would write it; tests start two of these.

Prints one JSON value: what came out, or when the error was raised.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import tailbound
from training.ranks import EXACT, Vector, build_mlp, plain_sgd


def train(network: tailbound.LossBound | None) -> list[list[float]]:
    """Three steps; ranks begin with different models and have 5 and 2 samples."""
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(7, 3, generator=rng), torch.randn(7, 1, generator=rng)
    own = slice(0, 5) if dist.get_rank() == 0 else slice(5, 7)
    model = build_mlp(dist.get_rank())
    with tailbound.attach(
        model, plain_sgd(model, 0.1), micro_batches=2, network=network
    ) as job:
        for _ in range(3):
            for part_x, part_y in job.micro_batches((x[own], y[own])):
                loss = torch.nn.functional.mse_loss(model(part_x), part_y)
                job.backward(loss, weight=len(part_x))
            job.step()
        job.check_replicas()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def both_networks() -> None:
    """Exact averaging over gloo, then the transport, met in the group's store."""
    dist.init_process_group("gloo")
    told = {"exact": train(None), "bounded": train(EXACT)}
    dist.destroy_process_group()
    print(json.dumps(told))


def forgotten() -> None:
    """Rank 0, which hosts server and store, ends without a close; rank 1 later."""
    model = Vector()
    job = tailbound.attach(model, plain_sgd(model))
    job.backward(model(torch.tensor([[1.0]])))
    job.step()
    if job.rank == 1:
        time.sleep(0.5)
        job.close()
    print(json.dumps(model.w.tolist()))


def failing() -> None:
    """A06: rank 0 raises in its loop; rank 1 waits for it in an all-reduce."""
    model = Vector()
    with tailbound.attach(model, plain_sgd(model)) as job:
        for step in range(1000):
            job.backward(model(torch.tensor([[1.0]])))
            if job.rank == 0 and step == 3:
                print(time.time())
                raise LookupError("no such sample: 17")
            job.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"networks": both_networks, "forgotten": forgotten, "failing": failing}[
        sys.argv[1]
    ]()

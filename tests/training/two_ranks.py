"""One rank of a real job, as a user would write it; tests start two of these.

Prints one JSON value: what came out, or when the error was raised.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import tailbound
from tailbound.protocol.messages import BucketSpec
from tailbound.training.attaching import attach_through
from tailbound.training.exchange import Exchange, ProcessGroupExchange
from training.fakes import HandClock
from training.ranks import EXACT, Vector, build_mlp, leave, plain_sgd


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
    print(json.dumps(told))
    leave()


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


def ddp_threshold() -> None:
    """S01: a DDP module, whole and then with rank 1 cut after one of three."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x_M1 = torch.tensor([[2.0, 6.0, 1.0], [10.0, 14.0, 3.0]][rank]).view(3, 1)
    hand = HandClock()
    model = torch.nn.parallel.DistributedDataParallel(Vector())
    exchanges: list[str] = []
    told: dict[str, list[float]] = {"grads": [], "exchanges": []}

    def make(specs: tuple[BucketSpec, ...]) -> Exchange:
        return CountingExchange(exchanges)

    with attach_through(
        make,
        model,
        plain_sgd(model),
        micro_batches=3,
        compute=tailbound.ComputeBound(threshold_s=1.0),
        clock=hand.clock(),
    ) as job:
        for late_s in (0.0, 2.0):
            before = model.module.w.item()
            exchanges.clear()
            for x in job.micro_batches(x_M1):
                job.backward(model(x))
                hand.pass_s(late_s * rank)
            job.step()
            told["grads"].append(before - model.module.w.item())
            told["exchanges"].append(len(exchanges))
    # DDP reduces again: the mean of 1 and 3.
    model.module.zero_grad()
    model(torch.tensor([[1.0 + 2.0 * rank]])).backward()
    told["ddp_again"] = [
        float(p.grad) for p in model.parameters() if p.grad is not None
    ]
    print(json.dumps(told))
    leave()


class CountingExchange(ProcessGroupExchange):
    """Notes every average."""

    def __init__(self, exchanges: list[str]) -> None:
        super().__init__()
        self._exchanges = exchanges

    def average(self, flat: torch.Tensor, told: tuple[float, ...]) -> tuple[float, ...]:
        """See ProcessGroupExchange."""
        self._exchanges.append("average")
        return super().average(flat, told)


def buffers() -> None:
    """A14: batch norm in DDP; rank 1 does 1 of 4 micro-batches, then 0 of 4."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    norm = torch.nn.BatchNorm1d(1)
    model = torch.nn.parallel.DistributedDataParallel(norm)
    told = []
    with tailbound.attach(
        model, plain_sgd(model, 0.0), micro_batches=4, network=None
    ) as job:
        for num in (1, 0):
            for number, x in enumerate(job.micro_batches(torch.ones(8, 1))):
                if rank == 1 and number >= num:
                    break
                job.backward(model(x * (1.0 + 4.0 * rank)).sum())
            job.step()
            assert norm.running_mean is not None
            told.append(float(norm.running_mean))
    print(json.dumps(told))
    leave()


def local_sgd() -> None:
    """Two periods of three local steps; in the second rank 1 is too slow for more."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Vector()
    told: list[float] = []
    bound = tailbound.ComputeBound(threshold_s=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tailbound.LocalSGD(model, optimizer, sync_every=3, compute=bound) as sgd:
        for wait_s in (0.0, 0.6):
            for x in sgd.local_steps(torch.full((3, 1, 1), 1.0 + rank)):
                sgd.step(model(x))
                if rank == 1:
                    time.sleep(wait_s)
            sgd.average()
            told.append(model.w.item())
        sgd.job.check_replicas()
    print(json.dumps([*told, 1]))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "networks": both_networks,
        "forgotten": forgotten,
        "failing": failing,
        "ddp_threshold": ddp_threshold,
        "buffers": buffers,
        "local_sgd": local_sgd,
    }[sys.argv[1]]()

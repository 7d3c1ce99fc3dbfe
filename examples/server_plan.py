"""Three ranks train one model; the gradients travel within a loss bound.

    torchrun --nproc-per-node 3 examples/server_plan.py [RECORDS]

Rank 0 also runs the server. The network is made bad on purpose: every process loses
5 % of the datagrams that it receives. With RECORDS, rank 0 writes its records there;
examples/records.py reads them.
"""

import os
import sys

import torch
from torch import nn

import tailbound

STEPS, BATCH, MICRO_BATCHES, LOSS = 60, 64, 2, 0.05


def make_data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own samples, labelled by a fixed random linear map."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(2048, 64, generator=rng)
    return x, (x @ teacher).argmax(1)


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    model = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data(rank)
    rng = torch.Generator().manual_seed(rank)
    records = None
    if rank == 0 and len(sys.argv) > 1:
        records = tailbound.RecordWriter(sys.argv[1])
    with tailbound.attach(
        model,
        optimizer,
        micro_batches=MICRO_BATCHES,
        network=tailbound.LossBound(p_low=0.008, p_high=0.408, window=5),
        transport=tailbound.Transport(
            plan="server",
            mtu=1500,  # as on Ethernet: 1448 bytes of gradient in a datagram
            impairments=tailbound.Impairments(
                losses=(tailbound.IndependentLoss(rate=LOSS),), seed=rank
            ),
        ),
        on_record=records,
        run="example",
    ) as job:
        for _ in range(STEPS):
            rows = torch.randint(len(x), (BATCH,), generator=rng)
            for inputs, labels in job.micro_batches((x[rows], y[rows])):
                job.backward(nn.functional.cross_entropy(model(inputs), labels))
            report = job.step()
            if rank == 0 and report.step % 10 == 0:
                print(
                    f"step {report.step}: loss {report.loss:.3f}, "
                    f"bound {report.p:.1%}, missing {report.missing_share:.1%}, "
                    f"exchange {1e3 * report.exchange_s:.1f} ms, {report.verdict}"
                )
        digest = job.check_replicas()
        if rank == 0:
            print(f"all {job.world_size} ranks hold the same parameters: {digest}")
    if records is not None:
        records.close()


if __name__ == "__main__":
    main()

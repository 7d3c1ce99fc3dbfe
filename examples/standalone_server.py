"""A worker of a job whose server is a process of its own.

Terminal 1, on the machine that shall reduce:

    tailbound serve --workers 2 --bind 127.0.0.1:29400

Terminal 2, on the workers' machine:

    torchrun --nproc-per-node 2 examples/standalone_server.py 127.0.0.1:29400

With machines of their own for the workers, bind the server to its address in the
network that they share, and run on each of them, with its own RANK:

    RANK=0 WORLD_SIZE=2 python examples/standalone_server.py 10.0.0.5:29400
"""

import sys

import torch
from torch import nn

import tailbound


def main(server: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tailbound.attach(
        model,
        optimizer,
        network=tailbound.LossBound(),
        transport=tailbound.Transport(plan="server", server=server, timeout_s=30.0),
    ) as job:
        rng = torch.Generator().manual_seed(job.rank)  # each rank its own samples
        for _ in range(100):
            x = torch.randn(64, 32, generator=rng)
            job.backward(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
            report = job.step()
        digest = job.check_replicas()
        print(f"rank {job.rank}: loss {report.loss:.3f}, parameters {digest}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: standalone_server.py HOST:PORT of a running `tailbound serve`")
    try:
        main(sys.argv[1])
    except (tailbound.ConfigError, tailbound.TailboundError) as error:
        sys.exit(f"standalone_server.py: {error}")

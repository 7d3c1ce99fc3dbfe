"""A DistributedDataParallel script whose gradients travel within a loss bound.

    torchrun --nproc-per-node 2 examples/ddp_hook.py

Everything but the two marked lines is as without tailbound. The network is made bad on
purpose: every process loses 5 % of the datagrams that it receives.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailbound


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    ddp = DistributedDataParallel(model)
    lossy = tailbound.Transport(
        mtu=1500,
        impairments=tailbound.Impairments(
            losses=(tailbound.IndependentLoss(rate=0.05),), seed=rank
        ),
    )
    state = tailbound.ddp_state(network=tailbound.LossBound(), transport=lossy)  # 1
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)  # 2
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(rank)  # each rank its own samples
    for _ in range(100):
        x = torch.randn(64, 32, generator=rng)
        loss = nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = state.last_step
    assert report is not None
    checksum = float(sum(p.detach().double().sum() for p in model.parameters()))
    print(
        f"rank {rank}: loss {loss.item():.3f}, the last step ran under p = {report.p} "
        f"and lost {report.missing_share:.1%}; parameters sum up to {checksum:.12f}"
    )
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

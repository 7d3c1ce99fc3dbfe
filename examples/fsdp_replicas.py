"""A model sharded by FSDP2 in two replicas, between which the network is lossy.

    torchrun --nproc-per-node 4 examples/fsdp_replicas.py

Inside a replica FSDP works as ever. Between the replicas gradients travel within a loss
bound: one line. The network is made bad on purpose: 5 % of the datagrams are lost.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tailbound
from tailbound.training.adapters.fsdp import bound_replicas


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    lossy = tailbound.Transport(
        mtu=1500,
        impairments=tailbound.Impairments(
            losses=(tailbound.IndependentLoss(rate=0.05),), seed=rank
        ),
    )
    replicas = bound_replicas(model, mesh["replica"], transport=lossy)  # the one line
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(rank)  # each rank its own samples
    for _ in range(50):
        x = torch.randn(64, 32, generator=rng)
        loss = nn.functional.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = replicas.last_step
    assert report is not None
    print(
        f"rank {rank}: loss {loss.item():.3f}, the last step ran under p = {report.p} "
        f"and lost {report.missing_share:.1%}"
    )
    replicas.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of four: two replicas of a model that is sharded over two ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tailbound
from tailbound.training.adapters.fsdp import bound_replicas
from training.adapters.launch import tell
from training.ranks import leave

EXACT = tailbound.LossBound.fixed(0.0)
QUICK = tailbound.Transport(timeout_s=20.0)


class Net(nn.Module):
    """Three layers; the second is used only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, all_layers: bool) -> Tensor:
        """Of shape (batch, 2)."""
        hidden = torch.tanh(self.first(x))
        if all_layers:
            hidden = torch.tanh(self.second(hidden))
        return torch.as_tensor(self.last(hidden))


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(rank: int, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=rng)


def shard(model: Net, mesh: DeviceMesh, **options: Any) -> None:
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> list[Tensor]:
    """Every gradient, put together again; zeros where there is none."""
    grads = []
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is None:
            grads.append(torch.zeros(parameter.shape))
        else:
            assert isinstance(grad, DTensor)
            grads.append(grad.full_tensor().float())
    return grads


def expected(step: int, weight_R: list[float], *, all_layers: bool) -> list[Tensor]:
    """The weighted mean over replicas of the mean over their ranks, in one process."""
    total = [torch.zeros(p.shape) for p in build().parameters()]
    for rank in range(4):
        model = build()
        model(batch(rank, step), all_layers=all_layers).square().mean().backward()
        share = weight_R[rank // 2] / sum(weight_R) / 2
        for sum_N, parameter in zip(total, model.parameters(), strict=True):
            if parameter.grad is not None:
                sum_N.add_(parameter.grad, alpha=share)
    return total


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def exact(mesh: DeviceMesh) -> list[Any]:
    """Three steps, the middle one with an unused layer; then one with weights."""
    model = build()
    shard(model, mesh["shard"])
    replicas = bound_replicas(
        model, mesh["replica"], network=EXACT, transport=QUICK, run="exact"
    )
    worst_S = []
    for step, (weights, all_layers) in enumerate(
        [([1.0, 1.0], True), ([1.0, 1.0], False), ([1.0, 3.0], True)]
    ):
        replicas.weight = weights[dist.get_rank() // 2]
        model(
            batch(dist.get_rank(), step), all_layers=all_layers
        ).square().mean().backward()
        worst_S.append(
            worst(whole(model), expected(step, weights, all_layers=all_layers))
        )
        model.zero_grad()
    report = replicas.last_step
    replicas.close()
    assert report is not None
    return [worst_S, report.step, report.total_weight, report.missing_share]


def bfloat16(mesh: DeviceMesh) -> list[Any]:
    """Reduced in bfloat16: the replicas agree bit for bit."""
    model = build()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    shard(model, mesh["shard"], mp_policy=policy)
    replicas = bound_replicas(model, mesh["replica"], network=EXACT, transport=QUICK)
    model(batch(dist.get_rank(), 0), all_layers=True).square().mean().backward()
    off = worst(whole(model), expected(0, [1.0, 1.0], all_layers=True))
    replicas.close()
    return [off]


def lossy(mesh: DeviceMesh) -> list[Any]:
    """Thirty steps that lose chunks; the sum over parameters tells replicas apart."""
    transport = tailbound.Transport(
        mtu=600,
        timeout_s=20.0,
        impairments=tailbound.Impairments(
            losses=(tailbound.IndependentLoss(rate=0.3),), seed=dist.get_rank()
        ),
    )
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40))
    fully_shard(model, mesh=mesh["shard"])
    records: list[Any] = []
    replicas = bound_replicas(
        model,
        mesh["replica"],
        network=tailbound.LossBound.fixed(0.408),
        transport=transport,
        on_record=records.append,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        x = torch.randn(8, 40, generator=rng)
        torch.autograd.backward(nn.functional.mse_loss(model(x), x))
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    missing = sum(getattr(record, "missing", 0) for record in records)
    local = [
        p.to_local().detach().flatten()
        for p in model.parameters()
        if isinstance(p, DTensor)
    ]
    bits = torch.cat(local).view(torch.int32).long()
    return [missing > 0, int((bits * torch.arange(1, len(bits) + 1)).sum())]


def refused(mesh: DeviceMesh) -> list[str]:
    """What is wrong is said when the model is bound."""
    plain, double = build(), build()
    fully_shard(double, mesh=mesh)
    server = tailbound.Transport(plan="server")
    said = []
    for model, axis, options in (
        (plain, mesh["replica"], {}),
        (double, mesh["replica"], {}),
        (plain, mesh, {}),
        (plain, mesh["replica"], {"transport": server}),
    ):
        try:
            bound_replicas(model, axis, **options)  # type: ignore[arg-type]
        except tailbound.ConfigError as error:
            said.append(str(error))
    return said


def lost(mesh: DeviceMesh) -> str:
    """The second replica goes; the first one's backward says so, with its type."""
    model = build()
    shard(model, mesh["shard"])
    replicas = bound_replicas(model, mesh["replica"], network=EXACT, transport=QUICK)
    rank = dist.get_rank()
    model(batch(rank, 0), all_layers=True).square().mean().backward()
    if rank // 2 == 1:
        replicas.abort("out of memory")
        return "gone"
    try:
        model(batch(rank, 1), all_layers=True).square().mean().backward()
    except tailbound.TailboundError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def single(mesh: DeviceMesh) -> list[Any]:
    """One replica: nothing to exchange, and no socket."""
    flat = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replica", "shard"))
    model = build()
    shard(model, flat["shard"])
    replicas = bound_replicas(model, flat["replica"], network=EXACT)
    model(batch(dist.get_rank(), 0), all_layers=True).square().mean().backward()
    off = worst(whole(model), expected(0, [1.0, 1.0], all_layers=True))
    return [off, replicas.step]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dims = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    modes = (exact, bfloat16, lossy, refused, single, lost)
    tell(dist.get_rank(), {mode.__name__: mode(dims) for mode in modes})
    leave()

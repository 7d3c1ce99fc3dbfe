"""One rank of DDP jobs with the hook, as a user writes them; prints one JSON value.

Each mode trains twice from the same start: with DDP's own reduction, then with ours.
"""

import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import tailbound
from tailbound.training.buckets import parameter_digest
from training.ranks import leave

EXACT = tailbound.LossBound.fixed(0.0)
QUICK = tailbound.Transport(timeout_s=20.0)


class Branches(nn.Module):
    """Two layers of which a batch may use one only, so that the other has no grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 40), nn.Linear(30, 40)
        self.last = nn.Linear(40, 1)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        """Through the first layer, and the second if both are wanted."""
        hidden = self.first(x) + (self.second(x) if both else 0.0)
        return torch.as_tensor(self.last(torch.tanh(hidden)))


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return Branches().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 30, generator=rng).to(dtype)


def run(
    hooked: bool,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    network: tailbound.LossBound = EXACT,
    transport: tailbound.Transport = QUICK,
    both: Callable[[int], bool] = lambda step: True,
    accumulate: bool = False,
    **options: Any,
) -> tuple[list[Tensor], Any, nn.Module]:
    """Gradients of every step; small buckets, so that a step has several."""
    model = build(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.003, **options)
    state = None
    if hooked:
        state = tailbound.ddp_state(network=network, transport=transport)
        ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    grads = []
    for step in range(steps):
        if accumulate:
            with ddp.no_sync():
                ddp(batch(100 + step, dtype)).square().mean().backward()
        ddp(batch(step, dtype), both(step)).square().mean().backward()
        grads.append(
            torch.cat(
                [
                    torch.zeros(p.numel())
                    if p.grad is None
                    else p.grad.flatten().float()
                    for p in model.parameters()
                ]
            )
        )
        optimizer.step()
        optimizer.zero_grad()
    if state is not None:
        assert state.last_step is not None
        assert state.last_step.step == steps
        state.close()
    return grads, state, model


def differences(**options: Any) -> list[float]:
    """The largest difference to DDP's own gradients, step by step."""
    own, _, _ = run(False, **options)
    ours, _, _ = run(True, **options)
    return [float((a - b).abs().max()) for a, b in zip(own, ours, strict=True)]


def matrix() -> dict[str, list[float]]:
    def first_only_later(step: int) -> bool:
        return step != 1

    return {
        "plain": differences(),
        "view": differences(gradient_as_bucket_view=True),
        "unused": differences(both=first_only_later, find_unused_parameters=True),
        "static": differences(static_graph=True),
        "no_sync": differences(accumulate=True),
        "float64": differences(dtype=torch.float64),
        "bfloat16": differences(dtype=torch.bfloat16),
        "float16": differences(dtype=torch.float16),
    }


def lossy() -> list[Any]:
    """200 steps that lose chunks: the replicas' digests and what the last step lost."""
    transport = tailbound.Transport(
        mtu=1500,
        timeout_s=20.0,
        impairments=tailbound.Impairments(
            losses=(tailbound.IndependentLoss(rate=0.3),), seed=dist.get_rank()
        ),
    )
    _, state, model = run(
        True,
        steps=200,
        network=tailbound.LossBound.fixed(0.408),
        transport=transport,
    )
    return [parameter_digest(model), state.last_step.p]


def uneven() -> list[float]:
    """Rank 1 has two batches fewer; DDP's join takes its place with zeros."""
    found = []
    for hooked in (False, True):
        model = build()
        ddp = DistributedDataParallel(model)
        state = tailbound.ddp_state(network=EXACT, transport=QUICK)
        if hooked:
            ddp.register_comm_hook(state, tailbound.bounded_allreduce)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([ddp]):
            for step in range(4 - 2 * dist.get_rank()):
                ddp(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        state.close()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return [float((found[0] - found[1]).abs().max())]


def two_modules() -> list[float]:
    """Each module has its own state; weights count."""
    totals = []
    models = [nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]
    states = []
    for model in models:
        nn.init.zeros_(model.weight)
        ddp = DistributedDataParallel(model)
        state = tailbound.ddp_state(network=EXACT, transport=QUICK)
        ddp.register_comm_hook(state, tailbound.bounded_allreduce)
        state.weight = 1.0 + 2.0 * dist.get_rank()
        states.append(state)
        ddp(torch.full((1, 3), 4.0 * dist.get_rank())).sum().backward()
        totals.append(float(model.weight.grad[0, 0]))  # type: ignore[index]
    for state in states:
        state.close()
    return totals


def copies() -> list[Any]:
    """A state is plain data: it is copied, pickled and goes on."""
    _, state, _ = run(True)
    twins = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    saved = io.BytesIO()
    torch.save(state.state_dict(), saved)
    saved.seek(0)
    fresh = tailbound.ddp_state()
    fresh.load_state_dict(torch.load(saved))
    steps = []
    for twin in (*twins, fresh):
        ddp = DistributedDataParallel(build())
        ddp.register_comm_hook(twin, tailbound.bounded_allreduce)
        ddp(batch(0)).square().mean().backward()
        steps.append(twin.step)
        twin.close()
    return steps


def wrapped() -> list[float]:
    """A02: inside torch's own wrapper, which chains a future to ours; A04: no overflow.

    Every gradient is 30000, whose sum over ranks float16 cannot hold.
    """
    model = nn.Linear(1000, 1, bias=False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    ddp.register_comm_hook(state, fp16_compress_wrapper(tailbound.bounded_allreduce))
    for _ in range(50):
        model.zero_grad()
        (30000.0 * ddp(torch.ones(1, 1000))).sum().backward()
    state.close()
    assert model.weight.grad is not None
    return torch.unique(model.weight.grad).tolist()  # type: ignore[no-any-return]


def sparse() -> str:
    """Sparse gradients are refused with the reason."""
    ddp = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    state = tailbound.ddp_state()
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    try:
        ddp(torch.tensor([1, 2])).sum().backward()
    except (RuntimeError, ValueError) as error:
        return f"{error} | {type(state.error).__name__}"
    return "no error"


def lost() -> str:
    """Rank 1 ends before its backward; rank 0 learns who is gone."""
    ddp = DistributedDataParallel(build())
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    for step in range(2):  # after the first one DDP itself meets
        ddp(batch(step)).square().mean().backward()
    if dist.get_rank() == 1:
        state.abort("out of memory")
        return "gone"
    try:
        for step in range(1, 1000):
            ddp(batch(step)).square().mean().backward()
    except (RuntimeError, tailbound.TailboundError):
        return f"{type(state.error).__name__}: {state.error}"
    return "no error"


def weighted() -> list[Any]:
    """Gradients that are sums in float16 already; 1 of 4 micro-batches, and 2 of 2."""
    model = nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(model)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    ddp.register_comm_hook(state, lambda s, bucket: s.reduce(bucket, is_weighted=True))
    rank = dist.get_rank()
    state.weight = [0.25, 1.0][rank]
    state.computed, state.planned = [(1, 4), (2, 2)][rank]
    ddp(torch.full((1, 1), [50000.0, 10000.0][rank]).half()).sum().backward()
    state.close()
    report = state.last_step
    assert report is not None
    assert model.weight.grad is not None
    return [
        model.weight.grad.item(),
        report.computed,
        report.planned,
        report.total_computed,
        report.total_planned,
    ]


def observed() -> str:
    """An error that on_record raises comes with its own type."""

    def on_record(record: Any) -> None:
        raise ValueError("disk full")

    ddp = DistributedDataParallel(build())
    state = tailbound.ddp_state(network=EXACT, transport=QUICK, on_record=on_record)
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    try:
        ddp(batch(0)).square().mean().backward()
    except RuntimeError:
        try:
            state.raise_if_failed()
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    finally:
        state.close()
    return "no error"


MODES: dict[str, Callable[[], Any]] = {
    mode.__name__: mode
    for mode in (
        *(matrix, lossy, uneven, two_modules, wrapped, copies, sparse, lost),
        *(weighted, observed),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps({mode: MODES[mode]() for mode in sys.argv[1:]}), flush=True)
    leave()

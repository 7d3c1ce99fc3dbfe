"""One rank of FIELD.md's cases of the hook; prints one JSON value, mode by mode.

Started by ``test_hook_cases.py``, which knows what must come out.
"""

import copy
import json
import math
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_wrapper,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import tailbound
from field.dropping import Rule, holds_inf, losing
from tailbound.protocol.events import Direction
from tailbound.training.buckets import parameter_digest
from training.hook_ranks import EXACT, QUICK
from training.ranks import Vector, leave, plain_sgd

P20 = tailbound.LossBound.fixed(0.2)
HIDDEN = 100
"""Width of the branches of S09: 77 chunks each at the smallest MTU."""


SMALL = tailbound.Transport(mtu=576, timeout_s=20.0)


def share_of(nth: int, rounds: tuple[int, ...]) -> Rule:
    """Of these rounds' gradients every nth chunk is lost, repairs too."""

    def rule(header: np.void, data: bytes) -> bool:
        is_hit = header["kind"] == Direction.IN and header["counter"] in rounds
        return bool(is_hit and header["sequence"] % nth == 1)

    return rule


def seeded(number: int, *shape: int) -> Tensor:
    """This rank's batch of a step."""
    rng = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(shape, generator=rng)


def gradients(model: nn.Module) -> Tensor:
    """All of them, flat; a parameter without one is an error."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


# -- S07: buckets that change between steps -----------------------------------------


def three_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 65), nn.Linear(65, 3))


def layered_ddp(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(
        model, bucket_cap_mb=0.002, find_unused_parameters=False
    )


def backward(ddp: nn.Module, step: int) -> None:
    ddp(seeded(step, 8, 7)).square().mean().backward()


def s07() -> dict[str, Any]:
    """Three steps without loss, beside DDP's own; what the hook was called with."""
    models = three_layers(), three_layers()
    own, ours = map(layered_ddp, models)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    calls: list[list[tuple[int, int]]] = []

    def hook(state: tailbound.DdpState, bucket: GradBucket) -> Future[Tensor]:
        calls[-1].append((bucket.index(), bucket.buffer().numel()))
        return tailbound.bounded_allreduce(state, bucket)

    ours.register_comm_hook(state, hook)
    differences = []
    for step in range(3):
        calls.append([])
        for ddp in (own, ours):
            ddp.zero_grad()
            backward(ddp, step)
        differences.append(apart(gradients(models[0]), gradients(models[1])))
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    state.close()
    return {"calls": calls, "differences": differences}


def s07_lossy() -> dict[str, Any]:
    """A fifth is lost in step 1 only; step 2 beside DDP's own from the same weights."""
    model = three_layers()
    ddp = layered_ddp(model)
    records: list[tailbound.RoundReport] = []
    state = tailbound.ddp_state(
        network=P20,
        transport=SMALL,
        on_record=lambda record: (
            records.append(record)
            if isinstance(record, tailbound.RoundReport)
            else None
        ),
    )
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    differences = []
    with losing(share_of(5, (1,))):  # step 1 is one bucket: DDP makes its own after it
        for step in range(2):
            twin = copy.deepcopy(model)
            backward(layered_ddp(twin), step)
            backward(ddp, step)
            differences.append(apart(gradients(twin), gradients(model)))
            optimizer.step()
            optimizer.zero_grad()
    state.close()
    missing = [
        sum(report.missing for report in records if report.step == step)
        for step in (1, 2)
    ]
    return {"differences": differences, "missing": missing}


# -- S08: a checkpoint of the hook ----------------------------------------------------


def s08() -> dict[str, Any]:
    """Ten steps of equal norms leave the critical regime; a new state goes on."""
    network = tailbound.LossBound(p_low=0.1, p_high=0.6, frequency=3)

    def train(state: tailbound.DdpState, steps: int) -> list[float]:
        ddp = DistributedDataParallel(Vector(8))
        ddp.register_comm_hook(state, tailbound.bounded_allreduce)
        bounds = []
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.ones(1, 8)).backward()
            assert state.last_step is not None
            bounds.append(state.last_step.p)
        return bounds

    state = tailbound.ddp_state(network=network, transport=QUICK)
    before = train(state, 10)
    saved = json.loads(json.dumps(state.state_dict()))
    state.close()
    fresh = tailbound.ddp_state(network=network, transport=QUICK)
    fresh.load_state_dict(saved)
    after = train(fresh, 1)
    fresh.close()
    return {"before": before, "after": after, "step": fresh.step}


# -- S09: parameters that nobody used -------------------------------------------------


class TwoBranches(nn.Module):
    """A always, B if asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """Mean square of what the branches give."""
        hidden = self.a(x) + (self.b(x) if both else 0.0)
        return torch.as_tensor(hidden).square().mean()


def unused(network: tailbound.LossBound) -> dict[str, Any]:
    model = TwoBranches()
    # Between a weight and a weight with its bias: a bucket for each branch.
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=0.0384, find_unused_parameters=True
    )
    records: list[tailbound.RoundReport] = []
    state = tailbound.ddp_state(
        network=network,
        transport=SMALL,
        on_record=lambda record: (
            records.append(record)
            if isinstance(record, tailbound.RoundReport)
            else None
        ),
    )
    branches = {id(p): name[0] for name, p in model.named_parameters()}
    buckets: list[str] = []

    def hook(state: tailbound.DdpState, bucket: GradBucket) -> Future[Tensor]:
        buckets.append("".join(branches[id(p)] for p in bucket.parameters()))
        return tailbound.bounded_allreduce(state, bucket)

    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    )
    kept = model.b.weight.detach().clone()
    ddp(seeded(1, 8, HIDDEN), both=False).backward()
    first = {
        "grad": [p.grad is None for p in (*model.a.parameters(), *model.b.parameters())]
    }
    optimizer.step()
    first["kept"] = [torch.equal(kept, model.b.weight)]
    optimizer.zero_grad()

    twin = copy.deepcopy(model)
    twin(seeded(2, 8, HIDDEN), both=True).backward()  # what rank 1 alone has
    expected = [p.grad / 2 for p in twin.b.parameters()]  # type: ignore[operator]
    for part in expected:
        dist.broadcast(torch.as_tensor(part), 1)
    ddp(seeded(2, 8, HIDDEN), both=dist.get_rank() == 1).backward()
    found = [p.grad for p in model.b.parameters()]
    state.close()
    optimizer.step()
    missing = {
        name: sum(r.missing for r in records if buckets[r.counter - 1] == name)
        for name in ("aa", "bb")
    }
    return {
        **first,
        "b": max(apart(e, f) for e, f in zip(expected, found, strict=True)),  # type: ignore[arg-type]
        "digest": parameter_digest(model),
        "buckets": buckets,
        "missing": missing,
    }


def s09() -> dict[str, Any]:
    return unused(EXACT)


def s09_lossy() -> dict[str, Any]:
    """A's bucket, the second of each step, loses a tenth."""
    with losing(share_of(10, (2, 4))):
        return unused(P20)


# -- S10: a scaler on every rank ------------------------------------------------------


def scaled(place: int, rule: Rule) -> dict[str, Any]:
    """Six steps in which rank 1's gradient is inf in one place."""
    model = Vector(5000)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2)
    state = tailbound.ddp_state(
        network=P20, transport=tailbound.Transport(mtu=1500, timeout_s=20.0)
    )
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    rank = dist.get_rank()
    scales, digests, skipped = [], [], 0
    with losing(rule) if rank == 1 else nullcontext():
        for step in range(6):
            x = seeded(step, 1, 5000)
            if rank == 1:
                x[0, place] = math.inf
            state.loss_scale = scaler.get_scale()
            optimizer.zero_grad()
            scaler.scale(ddp(x)).backward()
            before = model.w.detach().clone()
            scaler.step(optimizer)
            skipped += torch.equal(before, model.w)
            scaler.update()
            scales.append(scaler.get_scale())
            digests.append(parameter_digest(model))
    state.close()
    return {"scales": scales, "skipped": skipped, "digests": digests}


def s10_hole() -> dict[str, Any]:
    """In rank 0's shard: its sum never sees the inf, and gives it up."""
    return scaled(
        100, lambda header, data: header["kind"] == Direction.IN and holds_inf(data)
    )


def s10_mean() -> dict[str, Any]:
    """In rank 1's own shard: the mean that tells rank 0 of the inf is lost once."""
    lost: set[int] = set()

    def rule(header: np.void, data: bytes) -> bool:
        counter = int(header["counter"])
        if header["kind"] != Direction.BACK or not holds_inf(data):
            return False
        is_first = counter not in lost
        lost.add(counter)
        return is_first

    return scaled(4900, rule)


# -- S11: the bytes of bfloat16 -------------------------------------------------------


def s11() -> dict[str, Any]:
    """1001 elements, 1.5 on rank 0 and 2.5 on rank 1, 1399 bytes in a datagram."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sent: dict[tuple[int, ...], int] = {}

        def note(header: np.void, data: bytes, sent: Any = sent) -> bool:
            place = (header["kind"], header["counter"], header["sequence"])
            sent[tuple(map(int, place))] = len(data)
            return False

        model = Vector(1001, dtype)
        ddp = DistributedDataParallel(model)
        state = tailbound.ddp_state(
            network=EXACT, transport=tailbound.Transport(mtu=1451, timeout_s=20.0)
        )
        ddp.register_comm_hook(state, tailbound.bounded_allreduce)
        x = torch.full((1, 1001), 1.5 + dist.get_rank(), dtype=dtype)
        with losing(note):
            ddp(x).backward()
        state.close()
        gradient = model.w.grad
        assert gradient is not None
        found[str(dtype)] = [
            torch.unique(gradient).tolist(),
            str(gradient.dtype),
            sum(sent.values()),
            max(sent.values()),
        ]
    return found


def s11_exact() -> list[Any]:
    """The same over the process group; a step from 0 with rate 1."""
    model = Vector(1001, torch.bfloat16)
    x = torch.full((1, 1001), 1.5 + dist.get_rank(), dtype=torch.bfloat16)
    with tailbound.attach(model, plain_sgd(model), network=None) as job:
        job.backward(model(x))
        job.step()
    return [torch.unique(model.w).tolist(), str(model.w.dtype)]


# -- A02, A03, A12: what the hook gives back ------------------------------------------


def waits(frame: FrameType) -> bool:
    """A thread that stands in a blocking wait; its selector is none."""
    return frame.f_code.co_name in {"wait", "get", "acquire", "join"}


class Sampler(AbstractContextManager["Sampler"]):
    """Looks at the stack of the thread that completes futures while others work."""

    def __init__(self) -> None:
        self.num_samples = self.num_waits = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.0005):
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread.name == "tailbound-driver" and thread.ident in frames:
                    self.num_waits += waits(frames[thread.ident])
                    self.num_samples += 1


def a02() -> dict[str, Any]:
    """50 steps of four buckets under torch's wrapper, which chains a future to ours."""
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    compressed = fp16_compress_wrapper(tailbound.bounded_allreduce)
    num_calls = 0

    def hook(state: tailbound.DdpState, bucket: GradBucket) -> Future[Tensor]:
        nonlocal num_calls
        num_calls += 1
        return compressed(state, bucket)

    ddp.register_comm_hook(state, hook)
    with Sampler() as sampler:
        for step in range(50):
            ddp.zero_grad()
            ddp(seeded(step, 4, 100)).square().mean().backward()
    state.close()
    return {
        "calls": num_calls,
        "sampled": sampler.num_samples > 10,
        "waits": sampler.num_waits,
    }


def a03() -> dict[str, Any]:
    """Five steps of two micro-batches; what the futures hold."""
    found = {}
    for is_view in (False, True):
        models = three_layers(), three_layers()
        own, ours = (
            DistributedDataParallel(
                model, bucket_cap_mb=0.002, gradient_as_bucket_view=is_view
            )
            for model in models
        )
        state = tailbound.ddp_state(network=EXACT, transport=QUICK)
        told: list[tuple[bool, ...]] = []

        def hook(
            state: tailbound.DdpState, bucket: GradBucket, told: Any = told
        ) -> Future[Tensor]:
            buffer = bucket.buffer()
            place = (buffer.data_ptr(), len(buffer), buffer.dtype, buffer.device)

            def look(done: Future[Tensor]) -> Tensor:
                given = done.value()
                now = (given.data_ptr(), len(given), given.dtype, given.device)
                told.append(now == place)
                return given

            return tailbound.bounded_allreduce(state, bucket).then(look)

        ours.register_comm_hook(state, hook)
        differences = []
        for step in range(5):
            for ddp in (own, ours):
                with ddp.no_sync():
                    backward(ddp, 10 + step)
                backward(ddp, step)
            differences.append(apart(gradients(models[0]), gradients(models[1])))
            for model in models:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
        state.close()
        found[str(is_view)] = [differences, len(told), all(told)]
    return found


def a12() -> str:
    """Rank 1 is a step ahead of rank 0, as after a checkpoint of another step."""
    ddp = DistributedDataParallel(Vector(8))
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    state.load_state_dict({**state.state_dict(), "step": 6 + dist.get_rank()})
    ddp.register_comm_hook(state, tailbound.bounded_allreduce)
    try:
        ddp(torch.ones(1, 8)).backward()
    except (RuntimeError, tailbound.TailboundError):
        return f"{type(state.error).__name__}: {state.error}"
    finally:
        state.close()
    return "no error"


MODES: dict[str, Callable[[], Any]] = {
    mode.__name__: mode
    for mode in (s07, s07_lossy, s08, s09, s09_lossy, s10_hole, s10_mean)
}
MODES |= {mode.__name__: mode for mode in (s11, s11_exact, a02, a03, a12)}

if __name__ == "__main__":
    signal.alarm(90)  # whatever goes wrong, no test leaves a process behind
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps({mode: MODES[mode]() for mode in sys.argv[1:]}), flush=True)
    leave()

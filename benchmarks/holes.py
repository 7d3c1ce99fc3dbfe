"""What should stand in a hole, and which chunks should it be? Training decides.

    nice -n 19 python benchmarks/holes.py --keep RUNS.jsonl \
        --out benchmarks/results/holes.json --page docs/holes.md

One process plays four workers and the network between them. Each worker computes the
gradient of its own shard; its chunks leave in the order of ``protocol.chunks``; each is
lost with probability ``LOSS``; the round closes with the chunk that brings what is
missing down to the bound, so it always gives up all that it may. What arrived is
added up and divided by ``tailbound.reduction``, and a real optimizer steps.

Everything random follows from seed, step and worker, so runs that differ in one option
see the same model, batches and draws of loss. A run that is over is a line in
RUNS.jsonl and is not run again: the script may be stopped and started at will.
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

import tailbound
from tailbound.config import Order
from tailbound.lab.models import CharGPT
from tailbound.lab.tasks import CONTEXT, Task, adamw, load_task, sgd
from tailbound.protocol.chunks import ChunkLayout, allowed_missing, send_order
from tailbound.reduction import FORMATS, add_into, chunk_norms, finish_mean
from tailbound.residual import Residual

WORKERS = 4
LOSS = 0.01
"""Background loss of a chunk."""
ROOM_BYTES = 1448
"""Data of one datagram on Ethernet: 1500 less the headers of IP, UDP and a chunk."""
MOMENTUM = 0.9
FLOAT32 = FORMATS["float32"]

Optimizer = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adamw")
BOUNDS = (0.008, 0.1, 0.408, 0.8)
SEEDS = (0, 1, 2)
HOLES = ("zero", "received_mean", "residual", "residual, momentum")
MASKED = "residual, masked momentum"
"""As the last, and the velocity is 0 where a chunk arrived."""
ORDERS: tuple[Order, ...] = ("fixed", "norm")
"""Beside ``rotate``."""
ORDER_BOUNDS = (0.408, 0.8)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a task is trained: chosen with p = 0 on a seed that is not in the study."""

    steps: int
    batch_size: int
    """Of one worker."""
    learning_rates: dict[Optimizer, float]
    """At the first step; falls to 0 on a straight line."""


SETTINGS = {
    "digits": Setting(150, 8, {"sgd": 0.05, "adamw": 4e-3}),
    "mnist1d": Setting(120, 8, {"sgd": 0.05, "adamw": 2e-3}),
    "text": Setting(160, 4, {"sgd": 0.1, "adamw": 6e-3}),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a point of the grid."""

    task: str
    optimizer: Optimizer
    p: float
    holes: str
    order: Order
    seed: int


def grid() -> Iterator[Run]:
    """Every run, whole seeds first, so that what is stopped early still compares."""
    for seed in SEEDS:
        for task, optimizer in itertools.product(SETTINGS, OPTIMIZERS):
            yield Run(task, optimizer, 0.0, "zero", "rotate", seed)
            for p, holes in itertools.product(BOUNDS, HOLES):
                yield Run(task, optimizer, p, holes, "rotate", seed)
            for p, order in itertools.product(ORDER_BOUNDS, ORDERS):
                yield Run(task, optimizer, p, "zero", order, seed)
    for seed, task, p in itertools.product(SEEDS, SETTINGS, BOUNDS):
        yield Run(task, "sgd", p, MASKED, "rotate", seed)


@cache
def make_task(name: str) -> Task:
    """The lab's task; ``text`` with one block instead of two, for half the time."""
    task = load_task(name)
    if name == "text":
        model = partial(CharGPT, context=CONTEXT, num_blocks=1)
        return replace(task, make_model=model)
    return task


def close_round(
    order_C: NDArray[np.int64], p: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which chunks are there when a round closes at its bound, repairs included."""
    arrived_C = np.zeros(len(order_C), np.bool_)
    room = len(order_C) - allowed_missing(p, len(order_C))
    due_K = order_C
    while room:
        got_K = due_K[rng.random(len(due_K)) >= LOSS][:room]
        arrived_C[got_K] = True
        room -= len(got_K)
        due_K = due_K[~arrived_C[due_K]]
    return arrived_C


class MaskedResidual(Residual):
    """With the paper's momentum factor masking, which the library leaves out."""

    def note(self, arrived_C: NDArray[np.bool_]) -> None:
        super().note(arrived_C)
        assert self._velocity_CE is not None
        self._velocity_CE[arrived_C] = 0.0


class Workers:
    """The workers' senders and what reduces what arrives of them."""

    def __init__(self, run: Run, num_elements: int) -> None:
        self.run = run
        self.layout = ChunkLayout(num_elements, FLOAT32.wire.itemsize, ROOM_BYTES)
        self.missing: list[float] = []
        self._residuals: list[Residual] = []
        if run.holes.startswith("residual"):
            make = MaskedResidual if run.holes == MASKED else Residual
            momentum = 0.0 if run.holes == "residual" else MOMENTUM
            shape = (num_elements, self.layout.elements_per_chunk, FLOAT32)
            self._residuals = [make(*shape, momentum=momentum) for _ in range(WORKERS)]

    def reduce(
        self, step: int, gradient_WN: Iterable[NDArray[np.float32]], weight: float
    ) -> NDArray[np.float32]:
        """The mean of the workers' gradients, less what the network kept."""
        run, layout = self.run, self.layout
        size = layout.elements_per_chunk
        sum_N = np.zeros(layout.num_elements, FLOAT32.sum)
        weight_C = np.zeros(layout.num_chunks)
        for worker, values_N in enumerate(gradient_WN):
            values_N *= FLOAT32.sum.type(weight)
            if self._residuals:
                self._residuals[worker].apply(values_N)
            order_C = send_order(
                run.order,
                layout.num_chunks,
                counter=1 + step,
                share=worker / WORKERS,
                norm_C=chunk_norms(values_N, size) if run.order == "norm" else None,
            )
            rng = np.random.default_rng((run.seed, step, worker))
            arrived_C = close_round(order_C, run.p, rng)
            if self._residuals:
                self._residuals[worker].note(arrived_C)
            values_N[~np.repeat(arrived_C, size)[: len(values_N)]] = 0.0
            add_into(sum_N, values_N, FLOAT32)
            weight_C += weight * arrived_C
            self.missing.append(1.0 - float(arrived_C.mean()))
        is_mean_of_received = run.holes == "received_mean"
        return finish_mean(
            sum_N,
            WORKERS * weight,
            FLOAT32,
            weight_C=weight_C if is_mean_of_received else None,
            elements_per_chunk=size if is_mean_of_received else None,
            out=sum_N,
        )


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """The task's optimizer; without momentum where the senders have it."""
    rate = SETTINGS[run.task].learning_rates[run.optimizer]
    make: Callable[..., torch.optim.Optimizer]
    make = {"sgd": sgd, "adamw": adamw}[run.optimizer]
    optimizer = make(model, lr=rate)
    if "momentum" in run.holes:
        for group in optimizer.param_groups:
            if run.optimizer == "sgd":
                group["momentum"] = 0.0
            else:
                group["betas"] = (0.0, group["betas"][1])
    return optimizer


def train(run: Run) -> dict[str, Any]:
    """Train one model; returns the run with what came of it."""
    setting, task = SETTINGS[run.task], make_task(run.task)
    model = task.build_model(run.seed)
    optimizer = make_optimizer(run, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 - step / setting.steps
    )
    params = list(model.parameters())
    sizes = [param.numel() for param in params]
    workers = Workers(run, sum(sizes))
    feeds = [batches(task, run.seed, worker) for worker in range(WORKERS)]
    begun_s = time.process_time()
    losses: list[float] = []
    for step in range(setting.steps):
        gradient_WN = []
        for feed in feeds:
            x, y = next(feed)
            loss = task.loss(model(x), y)
            losses.append(loss.item())
            parts = torch.autograd.grad(loss, params)
            gradient_WN.append(torch.cat([part.flatten() for part in parts]).numpy())
        mean_N = workers.reduce(step, gradient_WN, setting.batch_size)
        flat = torch.from_numpy(mean_N).split(sizes)
        for param, part in zip(params, flat, strict=True):
            param.grad = part.view_as(param)
        optimizer.step()
        schedule.step()
        if not math.isfinite(losses[-1]):
            break
    test_accuracy, test_loss = evaluate(task, model)
    return asdict(run) | {
        "accuracy": test_accuracy,
        "test_loss": test_loss,
        "train_loss": statistics.fmean(losses[-10 * WORKERS :]),
        "missing": statistics.fmean(workers.missing),
        "chunks": workers.layout.num_chunks,
        "steps": step + 1,
        "cpu_s": round(time.process_time() - begun_s, 2),
    }


def batches(
    task: Task, seed: int, worker: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One worker's batches, epoch after epoch."""
    size = SETTINGS[task.name].batch_size
    for epoch in itertools.count():
        yield from task.batches(
            epoch=epoch, rank=worker, world_size=WORKERS, batch_size=size, seed=seed
        )


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """Accuracy and mean cross-entropy (nats) on the test set."""
    right, loss, count = 0, 0.0, 0
    for start in range(0, len(task.data.test_x), 256):
        rows = slice(start, start + 256)
        target = task.data.test_y[rows].long().flatten()
        output = model(task.prepare(task.data.test_x[rows], None)).flatten(0, -2)
        right += int((output.argmax(1) == target).sum())
        loss += float(F.cross_entropy(output, target, reduction="sum"))
        count += len(target)
    return right / count, loss / count


# -- what is kept and shown ---------------------------------------------------------


def read_lines(path: Path) -> dict[Run, dict[str, Any]]:
    """The runs that are over."""
    if not path.exists():
        return {}
    names = Run.__dataclass_fields__
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {Run(**{name: line[name] for name in names}): line for line in lines}


def metric(line: dict[str, Any]) -> float:
    """Accuracy in percent, or bits per character for ``text``."""
    if line["task"] == "text":
        return float(line["test_loss"]) / math.log(2.0)
    return 100.0 * float(line["accuracy"])


class Table:
    """Cells of Markdown: mean and half the range over the seeds."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self._values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        names = ("task", "optimizer", "p", "holes", "order")
        for line in lines:
            self._values[tuple(line[name] for name in names)].append(metric(line))

    def cell(self, *key: Any) -> str:
        values = self._values.get(key)
        if not values:
            return "not run"
        if not all(map(math.isfinite, values)):
            return "diverged"
        digits = 3 if key[0] == "text" else 1
        spread = (max(values) - min(values)) / 2
        text = f"{statistics.fmean(values):.{digits}f} ± {spread:.{digits}f}"
        return text if len(values) == len(SEEDS) else f"{text} ({len(values)} seeds)"

    def draw(self, *heads: str, rows: Iterable[list[str]]) -> str:
        lines = [list(heads), ["---"] * len(heads), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(lines: Iterable[dict[str, Any]]) -> str:
    """The results in Markdown."""
    table = Table(lines)
    kinds = list(itertools.product(SETTINGS, OPTIMIZERS))
    exact = table.draw(
        "task",
        "optimizer",
        "p = 0",
        rows=([*kind, table.cell(*kind, 0.0, "zero", "rotate")] for kind in kinds),
    )
    holes = table.draw(
        "task",
        "optimizer",
        "p",
        *HOLES,
        rows=(
            [*kind, f"{p:g}"] + [table.cell(*kind, p, name, "rotate") for name in HOLES]
            for kind in kinds
            for p in BOUNDS
        ),
    )
    masked = table.draw(
        "task",
        *(f"p = {p:g}" for p in BOUNDS),
        rows=(
            [task] + [table.cell(task, "sgd", p, MASKED, "rotate") for p in BOUNDS]
            for task in SETTINGS
        ),
    )
    orders = table.draw(
        "task",
        "optimizer",
        "p",
        "rotate",
        *ORDERS,
        rows=(
            [*kind, f"{p:g}"]
            + [table.cell(*kind, p, "zero", order) for order in ("rotate", *ORDERS)]
            for kind in kinds
            for p in ORDER_BOUNDS
        ),
    )
    return "\n\n".join(
        (
            "Nothing missing:",
            exact,
            "What stands in a hole (order `rotate`):",
            holes,
            "Momentum correction with the velocity masked where it arrived (SGD):",
            masked,
            "Which chunks are given up (holes `zero`):",
            orders,
        )
    )


def write_page(path: Path, text: str) -> None:
    """Put the tables between their marks."""
    begin, end = "<!-- tables: begin -->", "<!-- tables: end -->"
    page = path.read_text(encoding="utf-8")
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs, with what one needs to run them again."""
    return {
        "question": "what stands in a hole, and which chunks are given up",
        "configuration": {
            "workers": WORKERS,
            "background_loss": LOSS,
            "room_bytes": ROOM_BYTES,
            "momentum": MOMENTUM,
            "settings": {name: asdict(kind) for name, kind in SETTINGS.items()},
        },
        "seeds": SEEDS,
        "versions": {
            "tailbound": tailbound.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="runs, JSON lines")
    parser.add_argument("--out", type=Path, help="one JSON record of all runs")
    parser.add_argument("--page", type=Path, help="Markdown page with the table marks")
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    args = parser.parse_args()
    torch.set_num_threads(1)
    over = read_lines(args.keep)
    runs = list(grid())
    stop_s = time.monotonic() + 60.0 * args.max_minutes
    for run in runs:
        if run in over or time.monotonic() >= stop_s:
            continue
        over[run] = train(run)
        with args.keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps(over[run]) + "\n")
        print(f"{len(over)} of {len(runs)}: {json.dumps(over[run])}", flush=True)
    lines = [over[run] for run in runs if run in over]
    if args.out is not None:
        text = json.dumps(record(lines), indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.page is not None:
        write_page(args.page, tables(lines))


if __name__ == "__main__":
    main()

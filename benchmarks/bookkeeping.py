"""What the job costs beside a micro-batch's own forward and backward, on the CPU.

    python benchmarks/bookkeeping.py --out benchmarks/results/bookkeeping.json

Runs the smallest of models in a plain loop and through ``job.micro_batches`` and
``job.backward``, in turns, and takes each one's fastest turn: what is left is the
difference of code, not of the machine's mood.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

import tailbound
from tailbound.compute.budget import Budget
from tailbound.config import ComputeBound
from tailbound.training.accumulate import Accumulation
from tailbound.training.clocks import CpuClock

TURNS, MICRO_BATCHES = 60, 200


def make(preempt: str | None) -> tuple[torch.nn.Module, Accumulation]:
    model = torch.nn.Linear(1, 1)
    budget = None
    if preempt is not None:
        bound = ComputeBound(threshold_s=1e9, preempt=preempt)  # type: ignore[arg-type]
        budget = Budget(bound, num_micro_batches=MICRO_BATCHES, rank=0, world_size=1)
    return model, Accumulation(list(model.parameters()), CpuClock(), budget)


def plain(model: torch.nn.Module, x: torch.Tensor) -> Iterator[float]:
    while True:
        model.zero_grad()
        begun = time.perf_counter()
        for _ in range(MICRO_BATCHES):
            torch.autograd.backward(model(x).sum())
        yield time.perf_counter() - begun


def through_job(
    model: torch.nn.Module, accumulation: Accumulation, x: torch.Tensor
) -> Iterator[float]:
    parts = [x] * MICRO_BATCHES
    while True:
        model.zero_grad()
        begun = time.perf_counter()
        for part in accumulation.run(parts, MICRO_BATCHES):
            accumulation.backward(model(part).sum(), 1.0)
        yield time.perf_counter() - begun
        accumulation.finish()
        accumulation.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    x = torch.ones(1, 1)
    loops = {"plain": plain(torch.nn.Linear(1, 1), x)}
    for name, preempt in (
        ("no bound", None),
        ("micro_batch", "micro_batch"),
        ("backward", "backward"),
    ):
        loops[name] = through_job(*make(preempt), x)
    best_s = dict.fromkeys(loops, float("inf"))
    for _ in range(TURNS):
        for name, loop in loops.items():
            best_s[name] = min(best_s[name], next(loop))
    cost_us = {
        name: round(1e6 * (seconds - best_s["plain"]) / MICRO_BATCHES, 2)
        for name, seconds in best_s.items()
    }
    result = {
        "bookkeeping_us_per_micro_batch": cost_us,
        "plain_us": round(1e6 * best_s["plain"] / MICRO_BATCHES, 2),
        "turns": TURNS,
        "micro_batches": MICRO_BATCHES,
        "versions": {
            "tailbound": tailbound.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(result, indent=2))
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

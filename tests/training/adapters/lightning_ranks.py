"""One rank of two under Lightning's Trainer, on the CPU."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import IterableDataset

import tailbound
from tailbound.training.adapters.lightning import BoundedAllreduce
from tailbound.training.clocks import CpuClock
from training.adapters.launch import tell

RANK = int(os.environ["RANK"])
EXACT = tailbound.LossBound.fixed(0.0)
QUICK = tailbound.Transport(timeout_s=20.0)


class Batches(IterableDataset[Tensor]):
    """This rank's inputs, one number each."""

    def __init__(self, inputs: list[list[float]]) -> None:
        self._inputs = inputs

    def __iter__(self) -> Iterator[Tensor]:
        for numbers in self._inputs:
            yield torch.tensor(numbers)


class Line(LightningModule):
    """The loss is the mean of w * x: its gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.factor = 1.0
        self.computed = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.computed += 1
        return (self.w * batch).mean() * self.factor

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gradients(Callback):
    """Keeps w's gradient before each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, _: Any) -> None:
        self.seen.append(float(module.w.grad))


def fit(
    inputs: list[list[list[float]]],
    module: Line,
    callback: BoundedAllreduce,
    *,
    micro_batches: int = 1,
    more: tuple[Callback, ...] = (),
) -> tuple[list[float], Trainer]:
    """One epoch over this rank's part; the gradients that the optimizer saw."""
    gradients = Gradients()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
        callbacks=[callback, gradients, *more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Batches(inputs[RANK]), batch_size=None)
    trainer.fit(module, loader)
    return gradients.seen, trainer


def bounded(**options: Any) -> BoundedAllreduce:
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    return BoundedAllreduce(state, **options)


def last_window() -> list[Any]:
    """S03: nine micro-batches of 3, four in a window: 3.0 in each of three steps."""
    module, callback = Line(), bounded()
    seen, trainer = fit(2 * [9 * [[3.0]]], module, callback, micro_batches=4)
    step = callback.state.last_step
    assert step is not None
    fresh = bounded()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.ckpt")
        trainer.save_checkpoint(path)  # rank 0 writes
        if RANK == 0:
            saved = torch.load(path, weights_only=True)["callbacks"]
            fresh.load_state_dict(saved["BoundedAllreduce"])
    callback.state.close()
    return [seen, module.computed, step.total_weight, fresh.state.step]


def dropped() -> list[Any]:
    """S01: x = 2, 6, 1 here; 10, 14, 3 there, of which the clock lets the ends in."""
    now_s = iter([0.0] + 50 * [9.0 * RANK])
    module = Line()
    callback = bounded(threshold_s=5.0, clock=CpuClock(lambda: next(now_s)))
    inputs = [[[2.0], [6.0], [1.0]], [[10.0], [14.0], [3.0]]]
    seen, _ = fit(inputs, module, callback, micro_batches=3)
    callback.state.close()
    step = callback.state.last_step
    assert step is not None
    counts = [step.computed, step.planned, step.total_computed, step.total_planned]
    return [seen, module.computed, "training_step" in vars(module), counts]


def tokens() -> list[Any]:
    """S04: means of [4], [1, 1, 1] here; ten 2s, [8, 8] there, weighted by tokens."""

    class Weigh(Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Tensor, _: int
        ) -> None:
            assert callback.bounded is not None
            callback.bounded.weight = module.factor = float(len(batch))

    callback = bounded()
    inputs = [[[4.0], [1.0, 1.0, 1.0]], [10 * [2.0], [8.0, 8.0]]]
    seen, _ = fit(inputs, Line(), callback, micro_batches=2, more=(Weigh(),))
    callback.state.close()
    return [seen]


def manual() -> list[Any]:
    """Two batches without a reduction in between; the module divides by itself."""

    class Manual(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            ddp = self.trainer.strategy.model
            is_last = batch_idx % 2 == 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                self.manual_backward(super().training_step(batch, batch_idx) / 2)
            if is_last:
                self.seen.append(float(self.w.grad))  # type: ignore[arg-type]
                self.zero_grad()

    module, callback = Manual(), bounded()
    fit([[[3.0], [5.0]], [[7.0], [9.0]]], module, callback)
    callback.state.close()
    return module.seen


def failed() -> str:
    """Rank 1's training_step raises; rank 0 is told, and does not wait."""

    class Broken(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if RANK == 1 and batch_idx == 1:
                raise ValueError("no such label")
            return super().training_step(batch, batch_idx)

    callback = bounded()
    try:
        fit(2 * [5 * [[1.0]]], Broken(), callback)
    except ValueError as error:
        return str(error)
    except (RuntimeError, tailbound.TailboundError):
        return f"{type(callback.state.error).__name__}: {callback.state.error}"
    return "no error"


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = (last_window, dropped, tokens, manual, failed)
    tell(RANK, {mode.__name__: mode() for mode in modes})

"""One rank of two under Hugging Face's Trainer and under Accelerate, on the CPU."""

import contextlib
import os
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import tailbound
from tailbound.training.adapters.huggingface import BoundedReduction, bound
from tailbound.training.clocks import CpuClock
from training.adapters.launch import tell

RANK = int(os.environ["RANK"])
EXACT = tailbound.LossBound.fixed(0.0)
QUICK = tailbound.Transport(timeout_s=20.0)
# Values and how often each stands, in a micro-batch: S04's example.
PARTS = [[(4.0, 1), (1.0, 3)], [(2.0, 10), (8.0, 2)]]


class Sum(nn.Module):
    """Loss: sum of w * x over labelled items / their number; d/dw is x's mean."""

    accepts_loss_kwargs = True  # what the Trainer asks for

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None
    ) -> dict[str, Tensor]:
        """Divides by the number given, as models that know of it do."""
        is_item = labels.ne(-100)
        total = (self.w * x * is_item).sum()
        items = is_item.sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items}


class Mean(nn.Module):
    """The same, but it knows of its own micro-batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean over the items of the micro-batch."""
        is_item = labels.ne(-100)
        return {"loss": (self.w * x * is_item).sum() / is_item.sum()}


class BoundedTrainer(BoundedReduction, Trainer):
    """What a user writes."""


class Parts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """One sample is one micro-batch; both ranks' in the order of DistributedSampler."""

    def __init__(self, parts: list[list[tuple[float, int]]]) -> None:
        pairs = zip(*parts, strict=True)
        self._parts = [part for pair in pairs for part in pair]
        self._length = max(count for _, count in self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value, count = self._parts[index]
        labels = torch.full((self._length,), -100)
        labels[:count] = 0
        return {"x": torch.full((self._length,), value), "labels": labels}


class Gradients(TrainerCallback):
    """Keeps w's gradient before each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.seen.append(float(kwargs["model"].w.grad))


def ticks(*drops: int) -> CpuClock:
    """On the ranks named, the threshold of 5 s passes after the first micro-batch."""
    now_s = iter([0.0, *[9.0 if RANK in drops else 1.0] * 50])
    return CpuClock(lambda: next(now_s))


def train(
    model: nn.Module,
    parts: list[list[tuple[float, int]]],
    *,
    micro_batches: int,
    averages: bool = True,
    **options: Any,
) -> list[Any]:
    """One epoch; what the optimizer saw, and the sum of weights in the last step."""
    seen = Gradients()
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    with tempfile.TemporaryDirectory() as folder:
        trainer = BoundedTrainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=micro_batches,
                num_train_epochs=1,
                average_tokens_across_devices=averages,
                max_grad_norm=0.0,
                train_sampling_strategy="sequential",
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                dataloader_pin_memory=False,
            ),
            train_dataset=Parts(parts),
            callbacks=[seen],
            state=state,
            **options,
        )
        trainer.train()
    state.close()
    step = state.last_step
    assert step is not None
    return [seen.seen, step.total_weight, [step.total_computed, step.total_planned]]


def items() -> list[Any]:
    """S04: one numerator and one denominator over both ranks."""
    return train(Sum(), PARTS, micro_batches=2)


def items_dropped() -> list[Any]:
    """Three micro-batches, of which rank 1 leaves out its second."""
    parts = [[(4.0, 1), (1.0, 3), (5.0, 2)], [(2.0, 10), (8.0, 2), (7.0, 4)]]
    options: dict[str, Any] = {"threshold_s": 5.0, "clock": ticks(1)}
    return train(Sum(), parts, micro_batches=3, **options)


def items_of_each_rank() -> list[Any]:
    """The same where each rank divides by its own items."""
    parts = [[(4.0, 1), (1.0, 3), (5.0, 2)], [(2.0, 10), (8.0, 2), (7.0, 4)]]
    options: dict[str, Any] = {"threshold_s": 5.0, "clock": ticks(1)}
    return train(Sum(), parts, micro_batches=3, averages=False, **options)


def means_dropped() -> list[Any]:
    """The same where each micro-batch counts alike."""
    parts = [[(4.0, 1), (1.0, 3), (5.0, 2)], [(2.0, 10), (8.0, 2), (7.0, 4)]]
    options: dict[str, Any] = {"threshold_s": 5.0, "clock": ticks(1)}
    return train(Mean(), parts, micro_batches=3, **options)


def last_window() -> list[Any]:
    """S03 with two micro-batches in a window and three in all."""
    return train(Mean(), 2 * [3 * [(3.0, 1)]], micro_batches=2)


def failed() -> str:
    """Rank 1's model raises in the second step; rank 0 is told."""

    class Broken(Mean):
        steps = 0

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.steps += 1
            if RANK == 1 and self.steps == 2:
                raise ValueError("no such label")
            return super().forward(x, labels)

    try:
        train(Broken(), 2 * [3 * [(3.0, 1)]], micro_batches=1)
    except ValueError as error:
        return str(error)
    except tailbound.TailboundError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def accelerate() -> list[Any]:
    """S03 and a drop under Accelerate: windows of two, then a single one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        Parts([[(3.0, 1), (9.0, 1), (5.0, 1)], [(1.0, 1), (3.0, 1), (7.0, 1)]])
    )
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    bounded = bound(accelerator, prepared, state)
    seen = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            if bounded.is_over():
                continue
            accelerator.backward(prepared(**batch)["loss"])
            if accelerator.sync_gradients:
                seen.append(float(model.w.grad))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    state.close()
    return seen


def accelerate_dropped() -> list[Any]:
    """Windows of three; rank 1 leaves out its second; weights of 1, 2 and 3."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = Mean()
    loader = torch.utils.data.DataLoader(
        Parts([[(2.0, 1), (6.0, 2), (1.0, 3)], [(10.0, 1), (14.0, 2), (3.0, 3)]])
    )
    prepared, loader = accelerator.prepare(model, loader)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    bounded = bound(accelerator, prepared, state, threshold_s=5.0, clock=ticks(1))
    for batch in loader:
        with accelerator.accumulate(prepared):
            if bounded.is_over():
                continue
            bounded.weight = float(batch["labels"].ne(-100).sum())
            accelerator.backward(prepared(**batch)["loss"] * bounded.weight)
    state.close()
    return [float(model.w.grad)]  # type: ignore[arg-type]


def twice() -> list[Any]:
    """Two forwards in a micro-batch, of two in a window: both ranks' 3, 5 and 1, 7."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Mean()
    loader = torch.utils.data.DataLoader(
        Parts([[(3.0, 1), (5.0, 1)], [(1.0, 1), (7.0, 1)]])
    )
    prepared, loader = accelerator.prepare(model, loader)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    bound(accelerator, prepared, state)
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch)["loss"] + prepared(**batch)["loss"]
            accelerator.backward(loss)
    state.close()
    step = state.last_step
    assert step is not None
    grad = float(model.w.grad)  # type: ignore[arg-type]
    return [grad, step.total_computed, step.total_planned]


def by_hand() -> list[Any]:
    """The loop accumulates and divides, and Accelerate knows nothing of it."""
    accelerator = Accelerator(cpu=True)
    model = Mean()
    prepared = accelerator.prepare(model)
    state = tailbound.ddp_state(network=EXACT, transport=QUICK)
    bound(accelerator, prepared, state)
    numbers = [[3.0, 5.0], [1.0, 7.0]][RANK]
    for turn, number in enumerate(numbers):
        x, labels = torch.full((1, 1), number), torch.zeros(1, 1)
        with contextlib.nullcontext() if turn else accelerator.no_sync(prepared):
            accelerator.backward(prepared(x, labels)["loss"] / 2)
    state.close()
    return [float(model.w.grad)]  # type: ignore[arg-type]


def each_batch() -> str:
    """Accelerate is told to reduce in each micro-batch."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    prepared = accelerator.prepare(Mean())
    try:
        bound(accelerator, prepared, tailbound.ddp_state())
    except tailbound.ConfigError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = (
        *(items, items_dropped, items_of_each_rank, means_dropped, last_window),
        *(accelerate, accelerate_dropped, twice, by_hand, each_batch, failed),
    )
    tell(RANK, {mode.__name__: mode() for mode in modes})

"""Tasks: a model, real data and a metric, for the demo and for trying bounds.

A task is the same on every rank: models of one seed are equal bit for bit, and the
ranks' batches of one seed and epoch are disjoint parts of one permutation. Nothing
here reads or moves PyTorch's, NumPy's or Python's global random state.

Letters: B samples of a batch, N samples of a dataset.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailbound.errors import ConfigError
from tailbound.lab import datasets, models

TASKS: tuple[str, ...] = ("digits", "mnist1d", "text", "cifar10")

CONTEXT = 64
"""Characters that the text task's model sees."""
CIFAR10_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
CIFAR10_STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

Metric = Literal["accuracy", "perplexity"]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Prepare = Callable[[Tensor, torch.Generator | None], Tensor]


def load_task(name: str, *, data: Path | None = None) -> "Task":
    """Load a task's data and give the task.

    Args:
        name: one of ``TASKS``.
        data: ``text``: a text file, else the standard library's source is taken.
            ``cifar10``: the folder of the binary version, needed. ``mnist1d``: a
            folder that keeps the generated data. ``digits``: none.

    Raises:
        ConfigError: no such task, or its data is not there or not readable.
        MissingExtraError: a package that brings the data is not installed.
    """
    match name:
        case "digits":
            if data is not None:
                raise ConfigError(f"task 'digits' brings its own data, not {data}")
            return Task(
                name=name,
                data=datasets.digits(),
                make_model=models.digits_cnn,
                make_optimizer=partial(sgd, lr=0.05),
            )
        case "mnist1d":
            return Task(
                name=name,
                data=datasets.mnist1d(data),
                make_model=partial(
                    models.resnet,
                    dims=1,
                    in_channels=1,
                    widths=(24, 48, 96),
                    blocks_per_width=1,
                ),
                make_optimizer=partial(sgd, lr=0.05),
            )
        case "text":
            return Task(
                name=name,
                data=datasets.text(data, context=CONTEXT),
                make_model=partial(models.CharGPT, context=CONTEXT),
                make_optimizer=partial(adamw, lr=3e-3),
                prepare=as_tokens,
                metric_name="perplexity",
                label_smoothing=0.0,
            )
        case "cifar10":
            if data is None:
                raise ConfigError(
                    "task 'cifar10' needs the folder of CIFAR-10's binary version "
                    "(data_batch_1.bin to data_batch_5.bin, test_batch.bin) as data"
                )
            return Task(
                name=name,
                data=datasets.cifar10(data),
                make_model=partial(
                    models.resnet,
                    dims=2,
                    in_channels=3,
                    widths=(16, 32, 64),
                    blocks_per_width=3,
                ),
                make_optimizer=partial(sgd, lr=0.05, weight_decay=5e-4),
                prepare=normalize_and_augment,
            )
        case _:
            raise ConfigError(f"task is one of {', '.join(TASKS)}, not {name!r}")


def sgd(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    return torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay
    )


def adamw(model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """AdamW with nanoGPT's betas and decay of matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def as_is(x: Tensor, rng: torch.Generator | None) -> Tensor:
    """Give the inputs unchanged."""
    return x


def as_tokens(x: Tensor, rng: torch.Generator | None) -> Tensor:
    """Bytes, which take an eighth of the memory, to the int64 that embeddings take."""
    return x.long()


def normalize_and_augment(x: Tensor, rng: torch.Generator | None) -> Tensor:
    """Pixels (B, 3, 32, 32) uint8 to standardised float32; with rng, also moved.

    Moved: flipped with probability 1/2, shifted by up to 4 pixels each way.

    Source: He et al. 2016 (arXiv:1512.03385), section 4.2.
    """
    x = (x / 255.0 - CIFAR10_MEAN) / CIFAR10_STD
    if rng is None:
        return x
    flip = torch.rand(len(x), 1, 1, 1, generator=rng) < 0.5
    padded = F.pad(torch.where(flip, x.flip(3), x), (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, len(x), 1, 1, 1), generator=rng)
    image = torch.arange(len(x)).view(-1, 1, 1, 1)
    channel, pixel = torch.arange(3).view(-1, 1, 1), torch.arange(32)
    return padded[image, channel, top + pixel.view(-1, 1), left + pixel]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A model, its data, its optimizer and its metric."""

    name: str
    data: datasets.Dataset = field(repr=False)
    make_model: Callable[[], nn.Module] = field(repr=False)
    make_optimizer: MakeOptimizer = field(repr=False)
    prepare: Prepare = field(default=as_is, repr=False)
    """Stored inputs to the model's inputs; with a generator, also augmented."""
    metric_name: Metric = "accuracy"
    """``accuracy``: share of the test set in [0, 1]. ``perplexity``: exp of the mean
    negative log-likelihood of a character."""
    label_smoothing: float = 0.1
    """0.1 is the usual value (Szegedy et al. 2016). It also keeps gradients alive when
    every training sample is right, so that norms of consecutive steps compare."""

    @property
    def higher_is_better(self) -> bool:
        """True unless the metric is a perplexity."""
        return self.metric_name == "accuracy"

    @property
    def num_train(self) -> int:
        """Training samples."""
        return len(self.data.train_x)

    def build_model(self, seed: int) -> nn.Module:
        """Make a model on the CPU; the same seed gives the same bits."""
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would also seed the accelerators.
            torch.default_generator.manual_seed(seed)
            return self.make_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the task's optimizer, with the task's learning rate."""
        return self.make_optimizer(model)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, the mean over samples (over characters for ``text``).

        Args:
            output: logits, classes along the last axis.
            target: class numbers, int64, the shape of output without its last axis.
        """
        return F.cross_entropy(
            output.flatten(0, -2),
            target.flatten(),
            label_smoothing=self.label_smoothing,
        )

    def steps_per_epoch(self, *, world_size: int, batch_size: int) -> int:
        """Full batches that each rank gets in an epoch.

        Raises:
            ConfigError: there are not enough samples for one.
        """
        if world_size < 1 or batch_size < 1:
            raise ConfigError(
                f"world_size and batch_size are 1 or more, not {world_size} and "
                f"{batch_size}"
            )
        steps = self.num_train // (world_size * batch_size)
        if steps == 0:
            raise ConfigError(
                f"task {self.name!r} has {self.num_train} training samples, too few "
                f"for {world_size} x {batch_size}; take a smaller batch_size"
            )
        return steps

    def batches(
        self, *, epoch: int, rank: int, world_size: int, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches of one epoch, inputs and targets.

        All ranks cut the same permutation, which depends on seed and epoch only;
        their parts are disjoint and equally many, and what does not fill a batch on
        every rank is left out.

        Raises:
            ConfigError: rank is not below world_size, seed or epoch is negative, or
                there are not enough samples for one batch each.
        """
        steps = self.steps_per_epoch(world_size=world_size, batch_size=batch_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is in [0, {world_size}), not {rank}")
        if seed < 0 or epoch < 0:
            raise ConfigError(f"seed and epoch are 0 or more, not {seed} and {epoch}")
        order = torch.randperm(self.num_train, generator=generator(seed, epoch))
        end = steps * world_size * batch_size
        shard = order[rank:end:world_size].view(steps, batch_size)
        # Apart from the permutation's and from the other ranks'.
        rng = generator(seed, epoch, 1 + rank)
        return (
            (self.prepare(self.data.train_x[rows], rng), self.data.train_y[rows].long())
            for rows in shard
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Give the metric on the test set, on the device that the model is on.

        The model runs in evaluation mode and gets its own mode back.
        """
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        total, count = 0.0, 0
        for start in range(0, len(self.data.test_x), 256):
            rows = slice(start, start + 256)
            x = self.prepare(self.data.test_x[rows], None).to(device)
            target = self.data.test_y[rows].long().flatten().to(device)
            output = model(x).flatten(0, -2)
            if self.metric_name == "accuracy":
                total += (output.argmax(1) == target).sum().item()
            else:
                total += F.cross_entropy(output, target, reduction="sum").item()
            count += len(target)
        model.train(was_training)
        mean = total / count
        # np.exp and not math.exp: a diverged model's perplexity is inf, no error.
        with np.errstate(over="ignore"):
            return mean if self.metric_name == "accuracy" else float(np.exp(mean))


def generator(*key: int) -> torch.Generator:
    """Make a generator from whole numbers; different keys are unrelated."""
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))

"""Tasks train, shard without overlap, and are the same wherever they are loaded."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tailbound.errors import ConfigError
from tailbound.lab.tasks import TASKS, Task, load_task
from tailbound.training.buckets import parameter_digest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small operators are slower on many threads, and a worker has one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of 50 random images to train and 10 to test, and a text of 20 kB."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"):
        rows = rng.integers(0, 256, (10, 3073), dtype=np.uint8)
        rows[:, 0] = range(10)
        (folder / name).write_bytes(rows.tobytes())
    (folder / "text").write_bytes(b"a gradient in numbered chunks. " * 650)
    return folder


@pytest.fixture(scope="module")
def cifar10(data: Path) -> Task:
    return load_task("cifar10", data=data)


@pytest.fixture(scope="module")
def text(data: Path) -> Task:
    """281 windows of 64 to train, 31 to test."""
    return load_task("text", data=data / "text")


def first_batch(task: Task, batch_size: int) -> tuple[Tensor, Tensor]:
    return next(
        task.batches(epoch=0, rank=0, world_size=1, batch_size=batch_size, seed=0)
    )


def losses_on_one_batch(task: Task, *, batch_size: int, num_steps: int) -> list[float]:
    x, y = first_batch(task, batch_size)
    model = task.build_model(0)
    optimizer = task.build_optimizer(model)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(task: Task, *, epochs: int, world_size: int, batch_size: int) -> nn.Module:
    """Train as exact averaging over ranks does: on all ranks' batches together."""
    model = task.build_model(0)
    optimizer = task.build_optimizer(model)
    for epoch in range(epochs):
        shards = [
            task.batches(
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                batch_size=batch_size,
                seed=0,
            )
            for rank in range(world_size)
        ]
        for parts in zip(*shards, strict=True):
            optimizer.zero_grad()
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            loss = task.loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


class Answer(nn.Module):
    """Gives the same logits for every sample, or every character."""

    def __init__(self, logits: list[float], *, per_character: bool = False) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.per_character = per_character
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        shape = x.shape[: 2 if self.per_character else 1]
        return self.logits.expand(*shape, -1)


# loading


def test_the_tasks_are_four() -> None:
    assert TASKS == ("digits", "mnist1d", "text", "cifar10")


def test_a_task_that_is_none_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task("mnist")

    assert str(caught.value) == (
        "task is one of digits, mnist1d, text, cifar10, not 'mnist'"
    )


def test_digits_take_no_data() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task("digits", data=Path("here"))

    assert str(caught.value) == "task 'digits' brings its own data, not here"


def test_cifar10_needs_a_folder() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task("cifar10")

    assert str(caught.value) == (
        "task 'cifar10' needs the folder of CIFAR-10's binary version "
        "(data_batch_1.bin to data_batch_5.bin, test_batch.bin) as data"
    )


def test_a_tasks_text_is_short(text: Task) -> None:
    """Half a million numbers would bury a log."""
    assert repr(text) == (
        "Task(name='text', metric_name='perplexity', label_smoothing=0.0)"
    )


# models


def test_the_same_seed_gives_the_same_model_and_another_seed_another(
    text: Task,
) -> None:
    digests = [parameter_digest(text.build_model(seed)) for seed in (1, 1, 2)]

    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_global_random_state_stays_as_it_was(cifar10: Task) -> None:
    before = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]  # noqa: NPY002
    )

    model = cifar10.build_model(0)
    first_batch(cifar10, 10)
    cifar10.evaluate(model)

    after = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]  # noqa: NPY002
    )
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "text"])
def test_training_twice_gives_the_same_bits(
    name: str, cifar10: Task, text: Task
) -> None:
    task = {"cifar10": cifar10, "text": text}[name]

    first, second = (
        parameter_digest(train(task, epochs=1, world_size=2, batch_size=10))
        for _ in range(2)
    )

    assert first == second


def test_the_text_task_decays_matrices_only(text: Task) -> None:
    model = text.build_model(0)

    groups = text.build_optimizer(model).param_groups

    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [{p.dim() for p in group["params"]} for group in groups] == [{2}, {1}]
    assert sum(len(group["params"]) for group in groups) == len(
        list(model.parameters())
    )


# loss


def test_the_loss_is_a_mean_and_smooths_labels(cifar10: Task) -> None:
    """-0.91 ln 0.9 - 9 x 0.01 ln(0.1 / 9) = 0.50086, for one sample as for two."""
    logits = torch.log(torch.tensor([[0.9] + [0.1 / 9] * 9]))

    one = cifar10.loss(logits, torch.tensor([0]))
    two = cifar10.loss(logits.expand(2, -1), torch.tensor([0, 0]))

    assert one.item() == pytest.approx(0.50086, abs=1e-4)
    assert two.item() == pytest.approx(0.50086, abs=1e-4)


def test_the_loss_of_text_is_the_mean_over_characters(text: Task) -> None:
    """The logarithm of 256 where nothing is known; nothing is smoothed."""
    logits = torch.zeros(2, 3, 256)
    logits[0] = -1e9
    logits[0, :, 7] = 0.0

    loss = text.loss(logits, torch.full((2, 3), 7))

    assert loss.item() == pytest.approx(5.545177 / 2, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "text"])
def test_the_loss_falls_within_a_few_steps(
    name: str, cifar10: Task, text: Task
) -> None:
    task = {"cifar10": cifar10, "text": text}[name]

    losses = losses_on_one_batch(task, batch_size=8, num_steps=15)

    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_the_loss_of_mnist1d_falls_within_a_few_steps() -> None:
    losses = losses_on_one_batch(load_task("mnist1d"), batch_size=16, num_steps=8)

    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_digits_reach_97_percent_in_ten_epochs_of_three_workers() -> None:
    task = load_task("digits")

    accuracy = task.evaluate(train(task, epochs=10, world_size=3, batch_size=16))

    assert accuracy >= 0.97


# batches


def samples_of_an_epoch(
    task: Task, *, epoch: int = 0, seed: int = 0, world_size: int, batch_size: int
) -> list[list[bytes]]:
    """The samples that each rank gets, as their bytes."""
    return [
        [
            row.numpy().tobytes()
            for x, _ in task.batches(
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                batch_size=batch_size,
                seed=seed,
            )
            for row in x
        ]
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A text of which no two of the 29 training windows are equal."""
    path = tmp_path_factory.mktemp("numbered") / "text"
    path.write_bytes(b"".join(b"%064d" % number for number in range(33)))
    return load_task("text", data=path)


def test_ranks_get_disjoint_parts_and_as_many_batches_each(numbered: Task) -> None:
    """29 windows are two batches of four for three ranks, and 5 are left out."""
    ranks = samples_of_an_epoch(numbered, world_size=3, batch_size=4)

    assert numbered.num_train == 29
    assert numbered.steps_per_epoch(world_size=3, batch_size=4) == 2
    assert [len(rank) for rank in ranks] == [8, 8, 8]
    assert len({sample for rank in ranks for sample in rank}) == 24


def test_more_ranks_cut_the_same_permutation_finer(numbered: Task) -> None:
    (alone,) = samples_of_an_epoch(numbered, world_size=1, batch_size=8)
    even, odd = samples_of_an_epoch(numbered, world_size=2, batch_size=4)

    assert [s for pair in zip(even, odd, strict=True) for s in pair] == alone


def test_the_order_follows_seed_and_epoch_only(numbered: Task) -> None:
    def order(*, epoch: int, seed: int) -> list[list[bytes]]:
        return samples_of_an_epoch(
            numbered, epoch=epoch, seed=seed, world_size=2, batch_size=4
        )

    assert order(epoch=1, seed=0) == order(epoch=1, seed=0)
    assert order(epoch=1, seed=0) != order(epoch=0, seed=0)
    assert order(epoch=1, seed=0) != order(epoch=0, seed=1)


def test_targets_stay_with_their_inputs(numbered: Task) -> None:
    """A character's target is the next one of the same window."""
    x, y = first_batch(numbered, 4)

    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_too_few_samples_for_one_batch_each_are_refused(numbered: Task) -> None:
    assert numbered.steps_per_epoch(world_size=1, batch_size=29) == 1

    with pytest.raises(ConfigError) as caught:
        numbered.batches(epoch=0, rank=0, world_size=3, batch_size=10, seed=0)

    assert str(caught.value) == (
        "task 'text' has 29 training samples, too few for 3 x 10; "
        "take a smaller batch_size"
    )


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rank", 2, "rank is in [0, 2), not 2"),
        ("rank", -1, "rank is in [0, 2), not -1"),
        ("seed", -1, "seed and epoch are 0 or more, not -1 and 0"),
        ("epoch", -1, "seed and epoch are 0 or more, not 0 and -1"),
        ("world_size", 0, "world_size and batch_size are 1 or more, not 0 and 4"),
        ("batch_size", 0, "world_size and batch_size are 1 or more, not 2 and 0"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(
    numbered: Task, setting: str, value: int, message: str
) -> None:
    settings = {"epoch": 0, "rank": 0, "world_size": 2, "batch_size": 4, "seed": 0}

    with pytest.raises(ConfigError) as caught:
        numbered.batches(**(settings | {setting: value}))

    assert str(caught.value) == message


# images


def test_images_are_standardised_for_the_test_set(cifar10: Task) -> None:
    """(1 - 0.4914) / 0.2470, (0 - 0.4822) / 0.2435, (0.2 - 0.4465) / 0.2616."""
    image = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)

    pixels = cifar10.prepare(image.expand(1, 3, 32, 32), None)

    assert pixels.shape == (1, 3, 32, 32)
    assert pixels[0, :, 5, 9].tolist() == pytest.approx(
        [2.059109, -1.980287, -0.942278], abs=1e-5
    )


def test_training_images_are_flipped_or_shifted_by_up_to_four_pixels(
    cifar10: Task,
) -> None:
    """A bright pixel at row 16, column 10 lands within 4 of it or of its mirror 21."""
    images = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 16, 10] = 255

    moved = cifar10.prepare(images, torch.Generator().manual_seed(0))

    places = [divmod(int(image[0].argmax()), 32) for image in moved]
    assert {row for row, _ in places} == set(range(12, 21))
    assert {column for _, column in places} == {*range(6, 15), *range(17, 26)}


def test_another_epoch_moves_the_images_another_way(cifar10: Task) -> None:
    """All 50 images, summed: moving cuts off other pixels each time."""

    def total(epoch: int) -> float:
        batches = cifar10.batches(
            epoch=epoch, rank=0, world_size=1, batch_size=50, seed=0
        )
        return sum(x.double().sum().item() for x, _ in batches)

    assert total(0) == total(0)
    assert total(0) != total(1)


# evaluation


def test_accuracy_is_the_share_of_right_answers(cifar10: Task) -> None:
    """One of the ten test images is of class 3."""
    assert cifar10.evaluate(Answer([0.0] * 3 + [1.0] + [0.0] * 6)) == 0.1
    assert cifar10.higher_is_better


def test_knowing_nothing_has_a_perplexity_of_256(text: Task) -> None:
    assert text.evaluate(Answer([0.0] * 256, per_character=True)) == pytest.approx(
        256.0, rel=1e-5
    )
    assert not text.higher_is_better


def test_the_perplexity_of_a_diverged_model_is_infinite(text: Task) -> None:
    assert text.evaluate(Answer([1e4] + [0.0] * 255, per_character=True)) == np.inf


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_gives_the_model_its_mode_back(
    cifar10: Task, training: bool
) -> None:
    model = Answer([0.0] * 10).train(training)

    cifar10.evaluate(model)

    assert model.modes == [False]
    assert model.training is training


@pytest.mark.slow
def test_a_trained_character_model_beats_an_untrained_one(text: Task) -> None:
    untrained = text.evaluate(text.build_model(0))

    trained = text.evaluate(train(text, epochs=2, world_size=1, batch_size=16))

    assert trained < 0.5 * untrained

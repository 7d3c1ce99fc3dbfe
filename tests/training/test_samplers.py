"""Dropped samples are known exactly, and come back before the epoch ends (A15)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tailbound.errors import ConfigError
from tailbound.training import samplers
from tailbound.training.samplers import (
    MAX_PASSES,
    ResamplingSampler,
    resampled_batches,
)


def alone(data: bytes) -> tuple[bytes, ...]:
    """The all-gather of a job of one rank."""
    return (data,)


class Meeting:
    """An all-gather between threads."""

    def __init__(self, num: int) -> None:
        self._parts = [b""] * num
        self._barrier = Barrier(num, timeout=20.0)

    def of(self, rank: int) -> Callable[[bytes], tuple[bytes, ...]]:
        """The call for one rank."""

        def all_gather(data: bytes) -> tuple[bytes, ...]:
            self._parts[rank] = data
            self._barrier.wait()
            parts = tuple(self._parts)
            self._barrier.wait()
            return parts

        return all_gather


def load(
    sampler: ResamplingSampler, batch_size: int, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.arange(64)), batch_size, sampler=sampler, **options
    )


def train(
    sampler: ResamplingSampler,
    batches: Iterator[Any],
    keep: Callable[[int, int], int],
) -> list[list[int]]:
    """Use the first ``keep(step, size)`` of each batch; what was used, step by step."""
    used = []
    for step, (batch,) in enumerate(batches):
        num = keep(step, len(batch))
        used.append(batch[:num].tolist())
        sampler.acknowledge(len(batch), num)
    return used


def flatten(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def four_fifths(step: int, size: int) -> int:
    return max(1, size * 4 // 5)


def test_a15_with_redo_every_sample_is_used_at_least_once() -> None:
    sampler = ResamplingSampler(64, num_replicas=1, rank=0)

    used = train(
        sampler, resampled_batches(load(sampler, 5), sampler, alone), four_fifths
    )

    flat = flatten(used)
    assert sorted(set(flat)) == list(range(64))
    assert len(flat) == 64
    assert sampler.unused == ()


def test_a15_without_redo_the_unused_are_listed_exactly() -> None:
    sampler = ResamplingSampler(64, num_replicas=1, rank=0, shuffle=False)

    used = train(sampler, iter(load(sampler, 5)), four_fifths)

    # The last of each five, and of the last four the last.
    assert sampler.unused == (4, 9, 14, 19, 24, 29, 34, 39, 44, 49, 54, 59, 63)
    assert len(flatten(used)) == 51


@pytest.mark.parametrize("num_samples", [64, 61])
def test_all_ranks_take_equally_many_steps_whoever_dropped(num_samples: int) -> None:
    meeting = Meeting(3)

    def work(rank: int) -> list[list[int]]:
        sampler = ResamplingSampler(num_samples, num_replicas=3, rank=rank)
        # Rank 1 drops half, the others nothing.
        return train(
            sampler,
            resampled_batches(load(sampler, 4), sampler, meeting.of(rank)),
            lambda step, size: size // 2 if rank == 1 else size,
        )

    with ThreadPoolExecutor(3) as pool:
        used = list(pool.map(work, range(3)))

    assert len({len(steps) for steps in used}) == 1
    flat = [index for steps in used for batch in steps for index in batch]
    assert sorted(set(flat)) == list(range(num_samples))


def parts(num: int, **options: Any) -> list[list[int]]:
    return [
        list(ResamplingSampler(num, num_replicas=3, rank=rank, **options))
        for rank in range(3)
    ]


def test_the_ranks_have_disjoint_parts_of_one_permutation() -> None:
    flat = flatten(parts(63))

    assert sorted(flat) == list(range(63))
    assert flat != sorted(flat)


def test_what_does_not_divide_evenly_is_given_twice_or_left_out() -> None:
    assert parts(7, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert parts(7, shuffle=False, drop_last=True) == [[0, 3], [1, 4], [2, 5]]


def test_a_copy_that_was_dropped_is_not_missed() -> None:
    sampler = ResamplingSampler(7, num_replicas=3, rank=1, shuffle=False)
    list(sampler)

    sampler.acknowledge(3, 1)

    assert sampler.unused == (4,)  # not 0, which rank 0 has


def test_each_epoch_has_an_order_of_its_own() -> None:
    sampler = ResamplingSampler(16, num_replicas=1, rank=0)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    again = ResamplingSampler(16, num_replicas=1, rank=0)
    again.set_epoch(1)

    assert first != second
    assert list(again) == second
    assert list(ResamplingSampler(16, num_replicas=1, rank=0, seed=1)) != first


def test_samples_that_the_loader_left_out_come_back_too() -> None:
    sampler = ResamplingSampler(64, num_replicas=1, rank=0, shuffle=False)
    batches = resampled_batches(load(sampler, 5, drop_last=True), sampler, alone)

    used = train(sampler, batches, lambda step, size: size)

    # 60 in whole batches; the four that are left make no batch, in any pass.
    assert len(flatten(used)) == 60
    assert sampler.unused == (60, 61, 62, 63)


def test_a_rank_that_never_gets_anywhere_does_not_loop_for_ever() -> None:
    sampler = ResamplingSampler(6, num_replicas=1, rank=0, shuffle=False)
    data: DataLoader[Any] = DataLoader(
        TensorDataset(torch.arange(6)), 3, sampler=sampler
    )

    used = train(sampler, resampled_batches(data, sampler, alone), lambda step, size: 0)

    assert used == 2 * MAX_PASSES * [[]]
    assert sampler.unused == (0, 1, 2, 3, 4, 5)


def test_a_run_resumes_in_the_middle_of_an_epoch() -> None:
    first = ResamplingSampler(20, num_replicas=1, rank=0)
    whole = list(first)
    first.acknowledge(5, 3)
    first.acknowledge(5, 5)
    state = json.loads(json.dumps(first.state_dict()))

    second = ResamplingSampler(20, num_replicas=1, rank=0, seed=9)
    second.load_state_dict(state)

    assert len(second) == 10
    assert list(second) == whole[10:]
    assert second.unused == tuple(whole[3:5])


def test_a_run_resumes_in_the_middle_of_a_redo_pass() -> None:
    first = ResamplingSampler(4, num_replicas=1, rank=0, shuffle=False)
    list(first)
    first.acknowledge(4, 1)
    assert first.begin_redo(alone)
    list(first)
    first.acknowledge(1, 1)

    second = ResamplingSampler(4, num_replicas=1, rank=0)
    second.load_state_dict(first.state_dict())

    assert list(second) == [2, 3]


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "message"),
    [
        (20, 2, "num_replicas=1, here it is 2; start at an epoch's beginning"),
        (21, 1, "num_samples=20, here it is 21; load the same dataset"),
    ],
)
def test_a_state_of_another_job_is_refused(
    num_samples: int, num_replicas: int, message: str
) -> None:
    state = ResamplingSampler(20, num_replicas=1, rank=0).state_dict()
    other = ResamplingSampler(num_samples, num_replicas=num_replicas, rank=0)

    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(state)


def test_more_than_was_given_out_cannot_be_acknowledged() -> None:
    sampler = ResamplingSampler(4, num_replicas=1, rank=0)
    next(iter(sampler))

    with pytest.raises(ConfigError, match="each step take one whole batch"):
        sampler.acknowledge(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank is 0 to 1, not 2"),
        ({"num_replicas": 9, "rank": 0, "drop_last": True}, "8 samples are too few"),
    ],
)
def test_a_place_that_is_none_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ResamplingSampler(8, **arguments)


def test_the_place_in_the_job_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert list(ResamplingSampler([7, 7, 7, 7], shuffle=False)) == [1, 3]


READ_AHEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from tailbound.training.samplers import ResamplingSampler, resampled_batches

sampler = ResamplingSampler(64, num_replicas=1, rank=0)
data = TensorDataset(torch.arange(64))
loader = DataLoader(data, 5, sampler=sampler, num_workers=2)
used = []
for (batch,) in resampled_batches(loader, sampler, lambda data: (data,)):
    num = max(1, len(batch) * 4 // 5)
    used += batch[:num].tolist()
    sampler.acknowledge(len(batch), num)
print(sorted(set(used)) == list(range(64)), len(used), sampler.unused)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_that_read_ahead_change_nothing() -> None:
    """In a process of its own: the loader forks, which this one is too busy for."""
    source = Path(samplers.__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-c", READ_AHEAD],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50.0,
    )

    assert done.stdout.split() == ["True", "64", "()"], done.stderr

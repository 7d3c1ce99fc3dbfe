"""Splitting a batch into micro-batches, in the loader's own form."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tailbound.errors import ConfigError
from tailbound.training.batches import num_samples, split_batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def rows(first: int, end: int) -> list[list[int]]:
    return [[row, row] for row in range(first, end)]


X_5 = torch.arange(5).repeat_interleave(2).view(5, 2)
Y_5 = torch.arange(5)


def test_a_tensor_gives_tensors_that_differ_by_one_at_most() -> None:
    parts = split_batch(X_5, 2)

    assert [part.tolist() for part in parts] == [rows(0, 3), rows(3, 5)]


@pytest.mark.parametrize("make", [tuple, list])
def test_a_tuple_or_list_keeps_its_type_and_pairs_samples(make: type) -> None:
    parts = split_batch(make((X_5, Y_5)), 2)

    assert [type(part) for part in parts] == [make, make]
    assert parts[1][0].tolist() == rows(3, 5)
    assert parts[1][1].tolist() == [3, 4]


def test_a_named_tuple_keeps_its_names() -> None:
    first, second = split_batch(Pair(X_5, Y_5), 2)

    assert isinstance(first, Pair)
    assert first.y.tolist() == [0, 1, 2]
    assert second.x.tolist() == rows(3, 5)


def test_a_dict_keeps_its_keys_in_order() -> None:
    first, _ = split_batch({"x": X_5, "label": Y_5}, 2)

    assert list(first) == ["x", "label"]
    assert first["label"].tolist() == [0, 1, 2]


def test_fewer_samples_than_micro_batches_give_one_each() -> None:
    assert [part.tolist() for part in split_batch(Y_5[:2], 4)] == [[0], [1]]


def test_no_samples_give_no_micro_batch() -> None:
    assert list(split_batch((X_5[:0], Y_5[:0]), 4)) == []


def test_the_parts_are_views() -> None:
    part = split_batch(X_5, 2)[0]

    assert part.untyped_storage().data_ptr() == X_5.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X_5, Y_5[:4]), "one length on the first axis, not lengths 4, 5"),
        ((), "one length on the first axis, here are none"),
        ({}, "one length on the first axis, here are none"),
        (torch.tensor(1.0), "this one is 0-d"),
        ((X_5, torch.tensor(1.0)), "this one is 0-d"),
        ((X_5, [1, 2, 3, 4, 5]), "holds tensors, not a list"),
        ("words", "a tensor, or a tuple, list or dict of tensors, not a str"),
        (iter([X_5]), "not a list_iterator"),
        (None, "not a NoneType"),
    ],
)
def test_what_cannot_be_split_is_refused_at_once(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_batch(batch, 2)


@pytest.mark.parametrize("batch", [X_5, (X_5, Y_5), {"x": X_5, "label": Y_5}])
def test_a_batch_has_as_many_samples_as_its_first_axis_is_long(batch: Any) -> None:
    assert num_samples(batch) == 5

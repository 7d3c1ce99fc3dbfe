"""A model's gradients as flat buckets, its state as bytes, its digest."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import nn

from tailbound.errors import ConfigError, HandshakeError
from tailbound.training.buckets import (
    equalise,
    load_state_bytes,
    make_buckets,
    parameter_digest,
    state_bytes,
)


class Mixed(nn.Module):
    """Two dtypes, a frozen and an empty parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.b = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.tensor([5.0]))
        self.frozen = nn.Parameter(torch.tensor([9.0]), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("count", torch.tensor(7))


def test_there_is_one_bucket_per_dtype_in_the_dtypes_order() -> None:
    narrow, wide = make_buckets(Mixed())

    assert (narrow.spec.dtype, narrow.spec.names) == ("bfloat16", ("b",))
    assert (wide.spec.dtype, wide.spec.names) == ("float32", ("a", "c"))
    assert wide.spec.shapes == ((2, 2), (1,))


def test_gradients_lie_back_to_back_and_a_missing_one_is_zeros() -> None:
    model = Mixed()
    _, wide = make_buckets(model)
    wide.flat.fill_(8.0)
    model.a.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    wide.pull()

    assert wide.values_N.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]


def test_the_mean_goes_back_into_every_gradient() -> None:
    model = Mixed()
    _, wide = make_buckets(model)
    gradient = torch.zeros(2, 2)
    model.a.grad = gradient
    wide.values_N[:] = [5, 6, 7, 8, 9]

    wide.push()

    assert gradient.tolist() == [[5.0, 6.0], [7.0, 8.0]]  # in place
    assert model.c.grad is not None
    assert model.c.grad.tolist() == [9.0]
    wide.values_N[:] = 0.0
    assert model.c.grad.tolist() == [9.0]  # no view of the bucket


def test_a_transposed_gradient_is_read_and_written_in_the_parameters_order() -> None:
    model = Mixed()
    _, wide = make_buckets(model)
    model.a.grad = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()

    wide.pull()
    wide.flat.mul_(10.0)
    wide.push()

    assert wide.values_N.tolist() == [10.0, 20.0, 30.0, 40.0, 0.0]
    assert model.a.grad.tolist() == [[10.0, 20.0], [30.0, 40.0]]


def test_bfloat16_travels_as_its_bits() -> None:
    model = Mixed()
    narrow, _ = make_buckets(model)
    model.b.grad = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)

    narrow.pull()

    assert narrow.values_N.dtype == np.uint16
    assert narrow.values_N.tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Module(), "no trainable parameter"),
        (
            lambda: nn.Linear(1, 1, dtype=torch.complex64),
            "parameter weight is torch.complex64; gradients of float32, float64, "
            "float16, bfloat16 travel",
        ),
    ],
)
def test_a_model_without_gradients_that_travel_is_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_buckets(make())


def test_sparse_gradients_are_refused_with_the_remedy() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    (bucket,) = make_buckets(model)
    model(torch.tensor([1])).sum().backward()

    with pytest.raises(ConfigError, match="sparse=False"):
        bucket.pull()


def test_the_state_is_parameters_then_buffers_bit_for_bit() -> None:
    numbers = np.array([1, 2, 3, 4], "<f4").tobytes() + b"\x80\x3f\x00\x40"
    numbers += np.array([5, 9], "<f4").tobytes() + (7).to_bytes(8, "little")

    assert state_bytes(Mixed()) == numbers


def test_a_state_that_is_loaded_makes_replicas_equal() -> None:
    here, there = Mixed(), Mixed()
    with torch.no_grad():
        there.a.mul_(-1.0)
        there.b.fill_(float("nan"))
        there.get_buffer("count").fill_(11)

    load_state_bytes(here, state_bytes(there))

    assert state_bytes(here) == state_bytes(there)
    assert here.a.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert here.get_buffer("count").item() == 11


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 bytes here and 9 bytes on rank 0"):
        load_state_bytes(nn.Linear(1, 1), bytes(9))


def equalise_all(*models: nn.Module) -> list[BaseException | None]:
    """One thread a rank; what each raised."""
    parts = [b""] * len(models)
    all_here = Barrier(len(models), timeout=10.0)

    def join(rank: int) -> None:
        def all_gather(data: bytes) -> tuple[bytes, ...]:
            parts[rank] = data
            all_here.wait()
            return tuple(parts)

        equalise(models[rank], all_gather, rank)

    with ThreadPoolExecutor(len(models)) as pool:
        futures = [pool.submit(join, rank) for rank in range(len(models))]
        return [future.exception(10.0) for future in futures]


def test_all_ranks_get_rank_0s_state() -> None:
    models = [Mixed(), Mixed(), Mixed()]
    with torch.no_grad():
        models[0].a.fill_(3.0)
        models[2].get_buffer("count").fill_(12)

    assert equalise_all(*models) == [None, None, None]

    assert models[0].a.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert len({state_bytes(model) for model in models}) == 1


def test_differing_buffers_are_named_alike_on_every_rank() -> None:
    larger, smaller = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    larger.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    before = state_bytes(smaller)

    errors = equalise_all(larger, smaller)

    assert [type(error) for error in errors] == [HandshakeError, HandshakeError]
    assert {str(error) for error in errors} == {
        "the model's state differs: seen [3] int64 (rank 0) here, nothing (rank 1) "
        "there; build the same model on every rank"
    }
    assert state_bytes(smaller) == before


def test_the_digest_is_of_every_parameters_name_form_and_bits() -> None:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(-0.0)
    told = b"weight torch.float32 (1, 1)\x00\x00\x00\x40"
    told += b"bias torch.float32 (1,)\x00\x00\x00\x80"

    assert parameter_digest(model) == hashlib.sha256(told).hexdigest()[:16]

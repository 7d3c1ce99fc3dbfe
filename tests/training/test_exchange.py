"""The exact exchanges, alone and over a process group of one; the group's is a job."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tailbound.errors import ConfigError, PeerLostError
from tailbound.protocol.events import Reduced
from tailbound.training.exchange import (
    ExactExchange,
    LocalExchange,
    ProcessGroupExchange,
)


@pytest.fixture
def process_group() -> Iterator[ProcessGroupExchange]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield ProcessGroupExchange()
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce(
    exchange: ExactExchange,
    flat: torch.Tensor,
    weight: float,
    loss_scale: float = 1.0,
) -> Reduced:
    return exchange.all_reduce(
        flat,
        np.zeros(0),
        weight,
        learning_rate=None,
        loss_scale=loss_scale,
        computed=1.5,
        planned=2,
        is_last=True,
    )


@pytest.fixture(params=["local", "process group"])
def exchange(
    request: pytest.FixtureRequest, process_group: ProcessGroupExchange
) -> ExactExchange:
    return LocalExchange() if request.param == "local" else process_group


def test_the_mean_is_the_sum_over_the_weight(exchange: ExactExchange) -> None:
    flat = torch.tensor([6.0, -8.0])

    reduced = reduce(exchange, flat, 2.0)

    assert flat.tolist() == [3.0, -4.0]
    assert reduced == Reduced(0, 0, 2.0, 0.0, True, 5.0, None, "exact", (), 1.5, 2)


def test_without_any_weight_nothing_is_divided(exchange: ExactExchange) -> None:
    flat = torch.tensor([float("nan"), 7.0])

    reduced = reduce(exchange, flat, 0.0)

    assert flat[1] == 7.0
    assert (reduced.total_weight, reduced.norm) == (0.0, 0.0)


def test_the_norm_is_that_of_the_unscaled_gradient(exchange: ExactExchange) -> None:
    reduced = reduce(exchange, torch.tensor([30.0, 40.0]), 1.0, loss_scale=10.0)

    assert reduced.norm == 5.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_mean_keeps_the_dtype(exchange: ExactExchange, dtype: torch.dtype) -> None:
    flat = torch.tensor([3.0, 4.5], dtype=dtype)

    reduce(exchange, flat, 2.0)

    assert flat.dtype == dtype
    assert flat.tolist() == [1.5, 2.25]


@pytest.mark.parametrize("data", [b"", b"\0\xff text"])
def test_a_gather_gives_back_the_bytes(exchange: ExactExchange, data: bytes) -> None:
    assert exchange.all_gather(data) == (data,)


def test_leaving_an_exact_exchange_leaves_the_process_group_alone(
    exchange: ExactExchange,
) -> None:
    exchange.abort("an error")
    exchange.close()

    assert dist.is_initialized()
    assert (exchange.rank, exchange.world_size) == (0, 1)


def test_a_destroyed_process_group_is_a_lost_peer(
    process_group: ProcessGroupExchange,
) -> None:
    dist.destroy_process_group()

    with pytest.raises(PeerLostError, match="during an exact average"):
        process_group.average(torch.zeros(1), (1.0, 1.0, 1.0))
    with pytest.raises(PeerLostError, match="during an all-gather"):
        process_group.all_gather(b"")


def test_a_process_group_without_cpu_tensors_is_refused_with_the_remedy() -> None:
    dist.init_process_group("cuda:gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"\(cuda:gloo\) cannot; use init_proc"):
            ProcessGroupExchange()
    finally:
        dist.destroy_process_group()

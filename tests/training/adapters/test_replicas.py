"""What FSDP's hook does, without FSDP: gradients of a backward, replicas in threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError, RemoteError
from tailbound.records import RoundReport, StepReport
from tailbound.training.adapters.fsdp import Replicas
from tailbound.training.rendezvous import mesh_over
from training.ranks import EXACT, TIMEOUT_S


def run(
    work: Callable[[int, Replicas], Any],
    *,
    bound: LossBound = EXACT,
    on_record: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Two replicas; what each returned or raised."""
    store = HashStore()
    transport = Transport(timeout_s=TIMEOUT_S)

    def start(rank: int) -> Any:
        def meet() -> Any:
            return mesh_over(store, "mesh", rank, 2, bound, transport)

        replicas = Replicas(meet, rank=rank, on_record=on_record)
        try:
            return work(rank, replicas)
        finally:
            replicas.close()

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(start, rank) for rank in range(2)]
        return [
            future.exception(2 * TIMEOUT_S) or future.result() for future in futures
        ]


def backward(replicas: Replicas, gradients: list[Tensor]) -> list[Tensor]:
    """A backward that finds these gradients and hands them to the hook."""
    zero = torch.zeros(1, requires_grad=True)
    held = [gradient.clone() for gradient in gradients]

    def on_grad(_: Tensor) -> None:
        for gradient in held:
            replicas.reduce(gradient)

    hooked = zero * 1.0
    hooked.register_hook(on_grad)  # type: ignore[no-untyped-call]
    torch.autograd.backward(hooked.sum())
    return held


@pytest.mark.sockets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_group_becomes_the_weighted_mean_in_its_own_memory(
    dtype: torch.dtype,
) -> None:
    def work(rank: int, replicas: Replicas) -> list[list[float]]:
        replicas.weight = [0.25, 0.75][rank]
        parts = [[[4.0, 8.0], [2.0]], [[8.0, 0.0], [6.0]]][rank]
        held = backward(replicas, [torch.tensor(part, dtype=dtype) for part in parts])
        return [gradient.tolist() for gradient in held]

    assert run(work) == 2 * [[[7.0, 2.0], [5.0]]]


@pytest.mark.sockets
def test_a_backward_is_a_step_whatever_groups_it_has() -> None:
    """Two groups, then one, then two: three steps, and rounds with their numbers."""
    records: list[Any] = []

    def work(rank: int, replicas: Replicas) -> list[Any]:
        ones = torch.ones(3)
        for groups in (2, 1, 2):
            backward(replicas, groups * [ones])
        assert replicas.last_step is not None
        return [replicas.step, replicas.last_step.step, replicas.last_step.total_weight]

    assert run(work, on_record=records.append) == 2 * [[3, 3, 2.0]]
    for rank in range(2):
        mine = [r for r in records if isinstance(r, StepReport) and r.rank == rank]
        assert [report.step for report in mine] == [1, 2, 3]
    rounds = [r for r in records if isinstance(r, RoundReport) and r.direction == "in"]
    assert {report.step for report in rounds} == {1, 2, 3}


@pytest.mark.sockets
def test_each_groups_norm_may_be_compared() -> None:
    """per_layer: the round that ends a step has a norm of 0, which says nothing."""

    def work(rank: int, replicas: Replicas) -> tuple[bool, float | None]:
        for size in (1.0, 1.0, 10.0):
            backward(replicas, [torch.full((2,), size), torch.ones(2)])
        assert replicas.last_step is not None
        return replicas.last_step.critical, replicas.last_step.ratio

    bound = LossBound(p_low=0.0, p_high=0.5, frequency=1, per_layer=True)
    assert run(work, bound=bound) == 2 * [(False, 9.0)]


@pytest.mark.sockets
def test_an_error_on_one_replica_ends_the_other_with_its_reason() -> None:
    def work(rank: int, replicas: Replicas) -> Any:
        backward(replicas, [torch.ones(2)])
        if rank == 1:
            replicas.abort("out of memory")
            return "gone"
        return backward(replicas, [torch.ones(2)])

    error, gone = run(work)
    assert gone == "gone"
    assert isinstance(error, RemoteError)
    assert str(error) == "rank 1 ended the job: out of memory"


def test_without_other_replicas_a_gradient_stays() -> None:
    replicas = Replicas(None, rank=0)
    gradient = torch.tensor([1.0, 2.0])

    replicas.reduce(gradient)

    assert gradient.tolist() == [1.0, 2.0]


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    replicas = Replicas(lambda: pytest.fail("met"), rank=0)

    with pytest.raises(ConfigError, match=r"a gradient of torch\.complex64"):
        replicas.reduce(torch.tensor([1j]))


def test_a_float16_gradient_is_not_multiplied_by_more_than_one() -> None:
    replicas = Replicas(lambda: pytest.fail("met"), rank=0)
    replicas.weight = 3.0

    with pytest.raises(ConfigError, match=r"float16 gradient times the weight 3\.0"):
        replicas.reduce(torch.ones(2, dtype=torch.float16))


def test_closed_replicas_say_so() -> None:
    replicas = Replicas(lambda: pytest.fail("met"), rank=0)
    replicas.close()
    replicas.close()

    with pytest.raises(JobClosedError, match="bind the model anew"):
        backward(replicas, [torch.ones(1)])

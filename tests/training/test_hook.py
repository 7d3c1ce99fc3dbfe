"""The communication hook: DDP's own gradients, whatever its options."""

import json
import pickle
from typing import Any

import pytest
import torch

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, JobClosedError, PeerLostError
from tailbound.training.hook import (
    DdpState,
    bounded_allreduce,
    ddp_state,
    future_devices,
)
from training.ranks import finish, start_ranks

hooked = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]


class OneBucket:
    """What DDP hands to a hook, as far as a job of one rank looks."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        """Flat gradients."""
        return self._buffer

    def is_last(self) -> bool:
        """The step has no further bucket."""
        return True


def run_modes(*modes: str) -> list[dict[str, Any]]:
    """What both ranks printed."""
    outcomes = finish(start_ranks(*modes, script="hook_ranks.py"))
    for code, _, told in outcomes:
        assert code == 0, told[-2000:]
    return [json.loads(output) for _, output, _ in outcomes]


class TestInProcesses:
    """With real ranks."""

    pytestmark = hooked

    def test_gradients_are_those_of_ddp_whatever_its_options(self) -> None:
        first, second = run_modes("matrix")

        assert first == second
        found = first["matrix"]
        assert set(found) == {
            *("plain", "view", "unused", "static", "no_sync"),
            *("float64", "bfloat16", "float16"),
        }
        assert all(len(steps) == 3 for steps in found.values())
        # Ours is summed in float32; DDP sums float16 in float16, one unit apart.
        assert all(max(steps) <= 1e-6 for steps in found.values())

    def test_replicas_stay_alike_while_chunks_are_given_up(self) -> None:
        first, second = run_modes("lossy")

        assert first == second
        assert first["lossy"][1] == 0.408

    def test_uneven_inputs_weights_copies_and_refusals(self) -> None:
        first, second = run_modes(
            *("uneven", "two_modules", "wrapped", "copies", "sparse", "lost")
        )

        assert second.pop("lost") == "gone"
        assert first.pop("lost") == "RemoteError: rank 1 ended the job: out of memory"
        assert first == second
        assert first["uneven"][0] <= 1e-6
        # (0 * 1 + 4 * 3) / (1 + 3), and the same in the second module.
        assert first["two_modules"] == [3.0, 3.0]
        assert first["wrapped"] == [30000.0]
        assert first["copies"] == [4, 4, 4]
        assert first["sparse"] == (
            "sparse gradients do not travel within a loss bound; build the embedding "
            "with sparse=False | ConfigError"
        )

    def test_weighted_sums_planned_counts_and_errors_of_the_user(self) -> None:
        first, second = run_modes("weighted", "observed")

        # (50000 + 10000) / (1 / 4 + 1): the first rank's own mean is beyond float16.
        assert first.pop("weighted") == [48000.0, 1, 4, 3.0, 6]
        assert second.pop("weighted") == [48000.0, 2, 2, 3.0, 6]
        assert first == second
        assert first["observed"] == "ValueError: disk full"


def test_a_job_of_one_rank_opens_no_socket() -> None:
    state = ddp_state()
    buffer = torch.tensor([1.0, 2.0])

    future = bounded_allreduce(state, OneBucket(buffer))  # type: ignore[arg-type]

    assert future.value() is buffer


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    state = ddp_state()
    bucket = OneBucket(torch.tensor([1 + 2j]))

    with pytest.raises(ConfigError, match="complex64"):
        bounded_allreduce(state, bucket)  # type: ignore[arg-type]

    assert isinstance(state.error, ConfigError)
    with pytest.raises(ConfigError, match="complex64"):
        state.raise_if_failed()


def test_a_float16_gradient_is_not_multiplied_by_more_than_one() -> None:
    """40000 * 2 would travel as inf."""
    state = ddp_state()
    bucket = OneBucket(torch.full((2,), 40000.0, dtype=torch.float16))
    state.weight = 1.0
    bounded_allreduce(state, bucket)  # type: ignore[arg-type]
    state.weight = 2.0

    with pytest.raises(ConfigError, match=r"float16 gradient times the weight 2\.0"):
        bounded_allreduce(state, bucket)  # type: ignore[arg-type]


def test_a_sum_over_samples_is_divided_by_its_weight_also_on_one_rank() -> None:
    state = ddp_state()
    bucket = OneBucket(torch.tensor([8.0, 2.0]))
    state.weight = 4.0

    future = state.reduce(bucket, is_weighted=True)  # type: ignore[arg-type]

    assert future.value().tolist() == [2.0, 0.5]


def test_who_takes_a_bucket_on_a_gpu_waits_for_that_gpu() -> None:
    gpu = torch.device("cuda", 1)

    assert future_devices(gpu) == [gpu]
    assert future_devices(torch.device("cpu")) == []


def test_a_state_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="the state is dict"):
        bounded_allreduce({}, OneBucket(torch.ones(1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": None}, "network is a tailbound.LossBound, not None"),
        ({"transport": Transport(plan="server")}, "reduced without a server"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ddp_state(**settings)


def test_a_closed_state_reduces_no_more() -> None:
    state = ddp_state()
    state.close()
    state.close()
    state.abort("too late")

    with pytest.raises(JobClosedError, match="register a new state"):
        bounded_allreduce(state, OneBucket(torch.ones(1)))  # type: ignore[arg-type]


def test_a_state_is_plain_data() -> None:
    state = ddp_state(network=LossBound.fixed(0.1), run="a")
    state.weight, state.loss_scale, state.step = 3.0, 8.0, 17
    state.planned, state.computed = 4, 2.0
    state.error = PeerLostError(("rank 1",), "a step", "gone")

    twin: DdpState = pickle.loads(pickle.dumps(state))
    assert twin.network == LossBound.fixed(0.1)
    assert (twin.run, twin.error, twin.last_step) == ("a", None, None)
    assert (twin.planned, twin.computed) == (4, 2.0)
    told = {"step": 17, "weight": 3.0, "loss_scale": 8.0, "regime": None}
    assert twin.state_dict() == told

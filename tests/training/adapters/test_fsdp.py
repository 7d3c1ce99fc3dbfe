"""FSDP2 with bounded replicas: two replicas of two shards each, in processes."""

from typing import Any

import pytest

from training.adapters.launch import run_ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.sockets,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each of the four ranks found, by the name of the function."""
    return run_ranks("fsdp_ranks.py", num=4)


def test_gradients_are_the_weighted_mean_of_the_replicas(
    told: list[dict[str, Any]],
) -> None:
    """Also in the second step, in which no rank uses the middle layer."""
    for one in told:
        worst_S, step, total_weight, missing_share = one["exact"]
        assert len(worst_S) == 3
        assert max(worst_S) < 1e-6
        assert [step, total_weight, missing_share] == [3, 4.0, 0.0]


def test_gradients_reduced_in_bfloat16_are_right_to_its_precision(
    told: list[dict[str, Any]],
) -> None:
    assert max(one["bfloat16"][0] for one in told) < 0.01  # below 1, with eight bits


def test_replicas_stay_bit_identical_while_chunks_are_given_up(
    told: list[dict[str, Any]],
) -> None:
    lossy = [one["lossy"] for one in told]

    assert [has_lost for has_lost, _ in lossy] == 4 * [True]
    assert lossy[0] == lossy[2]
    assert lossy[1] == lossy[3]


def test_what_cannot_work_is_refused_when_the_model_is_bound(
    told: list[dict[str, Any]],
) -> None:
    for one in told:
        assert [words.partition(":")[0] for words in one["refused"]] == [
            "nothing is sharded here",
            "FSDP reduces first.weight across replicas itself",
            "replicas is one axis of a device mesh, not 2",
            "these gradients are reduced without a server",
        ]


def test_a_replica_that_goes_is_told_with_its_reason_and_the_errors_own_type(
    told: list[dict[str, Any]],
) -> None:
    assert [one["lost"] for one in told] == [
        "RemoteError: rank 1 ended the job: out of memory",
        "RemoteError: rank 1 ended the job: out of memory",
        "gone",
        "gone",
    ]


def test_one_replica_has_nothing_to_exchange(told: list[dict[str, Any]]) -> None:
    for one in told:
        off, steps = one["single"]
        assert off < 1e-6
        assert steps == 0

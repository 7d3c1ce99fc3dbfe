"""Local steps on each rank, averaged exactly after each period; numbers by hand."""

import json
from typing import Any

import pytest
import torch

import tailbound
from tailbound.config import ComputeBound, LossBound
from tailbound.errors import ConfigError, JobClosedError
from training.ranks import Vector, finish, plain_sgd, start_ranks


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_rank_alone_keeps_what_its_local_steps_made() -> None:
    model = Vector()
    batches = iter([torch.tensor([[x]]) for x in (1.0, 2.0, 4.0, 8.0)])

    with tailbound.LocalSGD(model, plain_sgd(model), sync_every=3) as sgd:
        for x in sgd.local_steps(batches):
            sgd.step(model(x))
        report = sgd.average()

    assert model.w.item() == -7.0
    assert (report.weight, report.planned, report.computed) == (3.0, 3, 3.0)
    assert next(batches).item() == 8.0


def test_a_period_without_local_steps_changes_nothing() -> None:
    model = Vector()

    with tailbound.LocalSGD(model, plain_sgd(model), sync_every=3) as sgd:
        report = sgd.average()

    assert report.skipped
    assert model.w.item() == 0.0


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_average_what_they_moved_by_the_steps_they_took() -> None:
    told = []
    for code, output, errors in finish(start_ranks("local_sgd")):
        assert code == 0, errors
        told.append(json.loads(output))

    assert told[0] == told[1]
    assert told[0] == [
        # Rank 0 moves by -1 in each of 3 steps, rank 1 by -2: the mean of -3 and -6.
        -4.5,
        # Then rank 1 is cut after one step, -2: (3 x -3 + 1 x -2) / 4 further.
        -4.5 - 2.75,
        # And the replicas are equal bit for bit.
        1,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every is 1 or more local steps, not 0"),
        ({"network": LossBound()}, r"network is None or LossBound.fixed\(0.0\)"),
        ({"compute": ComputeBound(preempt="backward")}, "whole or not taken"),
        ({"sync_every": 1, "compute": ComputeBound()}, "micro_batches to 2 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(
    options: dict[str, Any], message: str
) -> None:
    model = Vector()

    with pytest.raises(ConfigError, match=message):
        tailbound.LocalSGD(model, plain_sgd(model), **({"sync_every": 4} | options))


def test_an_error_in_the_loop_ends_the_job() -> None:
    model = Vector()
    sgd = tailbound.LocalSGD(model, plain_sgd(model), sync_every=2)

    with pytest.raises(LookupError), sgd:
        raise LookupError

    with pytest.raises(JobClosedError):
        sgd.average()
    sgd.close()

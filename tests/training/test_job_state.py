"""What a job carries over a restart, on ranks that are threads around real sockets."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tailbound
from tailbound.config import ComputeBound, LossBound, Transport
from tailbound.errors import ConfigError, HandshakeError
from tailbound.records import ThresholdReport
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.exchange import LocalExchange
from training.fakes import HandClock
from training.mesh_ranks import run_mesh
from training.ranks import TIMEOUT_S, Vector, plain_sgd, run_ranks

pytestmark = pytest.mark.sockets

# Norms 1, 1.1, 1.2, ... with two jumps: the regime changes at several checks.
NORMS = [1.0 + 0.1 * step + (9.0 if step in (11, 17) else 0.0) for step in range(30)]
PHASES = LossBound(p_low=0.1, p_high=0.6, frequency=3, window=2, eta=0.3)


def decide(
    rank: int,
    make_exchange: MakeExchange,
    *,
    steps: range,
    state: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """One gradient of a known norm a step; what was decided, and the state after it.

    The bucket is one chunk, of which nothing may be missing: norms repeat exactly.
    """
    model = Vector()
    told = []
    with attach_through(make_exchange, model, plain_sgd(model)) as job:
        if state is not None:
            job.load_state_dict(state)
        for step in steps:
            job.backward(model(torch.tensor([[NORMS[step]]])))
            report = job.step()
            told.append((report.step, report.p, report.norm, report.verdict))
        return told, job.state_dict()


def test_the_loss_bounds_after_a_restart_are_those_without_it() -> None:
    ((whole, end), _) = run_mesh(partial(decide, steps=range(30)), bound=PHASES)

    ((before, state), _) = run_mesh(partial(decide, steps=range(13)), bound=PHASES)
    outcomes = run_mesh(
        partial(decide, steps=range(13, 30), state=json.loads(json.dumps(state))),
        bound=PHASES,
    )

    assert len({p for _, p, _, _ in whole[13:]}) == 2
    for after, last in outcomes:
        assert before + after == whole
        assert last == end


def test_so_are_those_of_a_job_with_more_ranks() -> None:
    ((whole, _), _) = run_mesh(partial(decide, steps=range(20)), bound=PHASES)
    ((_, state), _) = run_mesh(partial(decide, steps=range(13)), bound=PHASES)

    outcomes = run_mesh(
        partial(decide, steps=range(13, 20), state=state), bound=PHASES, num=3
    )

    for after, _ in outcomes:
        assert [entry[:2] for entry in after] == [entry[:2] for entry in whole[13:]]


def test_a_job_that_starts_without_its_state_would_begin_critical() -> None:
    """What the state is for: the same steps, another bound."""
    ((whole, _), _) = run_mesh(partial(decide, steps=range(20)), bound=PHASES)

    ((after, _), _) = run_mesh(partial(decide, steps=range(13, 20)), bound=PHASES)

    assert [p for _, p, _, _ in after] != [p for _, p, _, _ in whole[13:]]


def test_s08_the_state_is_small_plain_data_and_equal_on_all_ranks(
    tmp_path: Path,
) -> None:
    outcomes = run_mesh(partial(decide, steps=range(10)), bound=PHASES)

    (_, state), (_, other) = outcomes
    torch.save(state, tmp_path / "state.pt")
    assert state == other
    assert (tmp_path / "state.pt").stat().st_size < 1_000_000
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert (state["version"], state["step"], len(state["ranks"])) == (1, 10, 2)


def load(
    rank: int, make_exchange: MakeExchange, *, states: list[dict[str, Any]]
) -> int:
    model = Vector()
    with attach_through(make_exchange, model, plain_sgd(model)) as job:
        job.load_state_dict(states[rank])
        return job.num_steps


def test_ranks_that_load_different_states_all_hear_of_it() -> None:
    ((_, early), _) = run_mesh(partial(decide, steps=range(5)), bound=PHASES)
    ((_, late), _) = run_mesh(partial(decide, steps=range(6)), bound=PHASES)

    outcomes = run_mesh(partial(load, states=[late, early]), bound=PHASES)

    for outcome in outcomes:
        assert isinstance(outcome, HandshakeError)
        text = str(outcome)
        assert text.startswith("the state loaded differs: step 6, digest ")
        assert "(rank 0) here, step 5, digest " in text
        assert text.endswith("(rank 1) there; load the same checkpoint on every rank")


def test_in_the_server_plan_steps_come_back_and_the_regime_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ((_, state), _) = run_mesh(partial(decide, steps=range(10)), bound=PHASES)
    assert state["regime"]["critical"] is False

    with caplog.at_level(logging.WARNING):
        outcomes = run_ranks(
            partial(decide, steps=range(10, 12), state=state), bound=PHASES
        )

    for told, last in outcomes:
        assert [(step, p) for step, p, _, _ in told] == [(11, 0.1), (12, 0.1)]
        assert last["regime"] is None
    (record,) = caplog.records
    assert "the server decides the loss bound, and starts critical" in record.message


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "not what job.state_dict() gave: Object missing required field"),
        (None, "not what job.state_dict() gave: Expected `object`, got `null`"),
        (
            {"version": 2, "step": 1, "regime": None, "ranks": [{}]},
            "missing required field `compute`",
        ),
        (
            {
                "version": 2,
                "step": 1,
                "regime": None,
                "ranks": [{"compute": None, "sampler": None}],
            },
            "a job's state of version 2, this is tailbound's 1: resume with",
        ),
        ({"version": 1, "step": 1, "regime": None, "ranks": []}, "of version 1"),
    ],
)
def test_what_is_no_state_is_refused(state: Any, words: str) -> None:
    model = Vector()
    with (
        attach_through(lambda specs: LocalExchange(), model, plain_sgd(model)) as job,
        pytest.raises(ConfigError) as caught,
    ):
        job.load_state_dict(state)

    assert words in str(caught.value)


def test_a_regime_that_is_none_is_refused_on_the_rank_that_has_it() -> None:
    state = {
        "version": 1,
        "step": 1,
        "regime": {"critical": True},
        "ranks": [{"compute": None, "sampler": None}] * 2,
    }

    outcomes = run_mesh(partial(load, states=[state, state]), bound=PHASES)

    assert all(isinstance(outcome, ConfigError) for outcome in outcomes[:1])
    assert "not the state of a regime detector" in str(outcomes[0])


# -- the compute bound --------------------------------------------------------------

AUTO = ComputeBound(warmup_steps=2, calibration_steps=4, retune_every=5, max_drop=0.2)


def straggle(
    rank: int,
    make_exchange: MakeExchange,
    *,
    steps: range,
    state: dict[str, Any] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The ranks take turns to be slow; thresholds by step, and the state after."""
    hand = HandClock()
    model = Vector()
    told: list[Any] = []
    with attach_through(
        make_exchange,
        model,
        plain_sgd(model),
        micro_batches=5,
        compute=AUTO,
        clock=hand.clock(),
        on_record=lambda record: (
            told.append(record.step) if isinstance(record, ThresholdReport) else None
        ),
    ) as job:
        if state is not None:
            job.load_state_dict(state)
        for step in steps:
            told.append(job.threshold_s)
            for number, x in enumerate(job.micro_batches(iter(torch.ones(99, 1)))):
                job.backward(model(x))
                is_slow = number in (1, 3) and step % 2 == rank
                hand.pass_s(1.5 if is_slow else 0.1)
            job.step()
        return told, job.state_dict()


def test_the_calibration_goes_on_where_it_was() -> None:
    ((_, state), _) = run_mesh(partial(straggle, steps=range(4)))

    outcomes = run_mesh(partial(straggle, steps=range(4, 8), state=state))

    for told, _ in outcomes:
        # Two steps were measured before; the threshold comes after two more.
        assert told == [None, None, 6, pytest.approx(1.65), pytest.approx(1.65)]


def test_the_threshold_is_in_force_from_the_first_step_after_a_restart() -> None:
    ((_, state), _) = run_mesh(partial(straggle, steps=range(8)))

    outcomes = run_mesh(partial(straggle, steps=range(8, 12), state=state))

    for told, _ in outcomes:
        # The next look is due five steps after the first, at step 11.
        assert told[:3] == 3 * [pytest.approx(1.65)]
        assert told[3] == 11


def test_with_other_ranks_the_threshold_stays_and_the_samples_are_new() -> None:
    ((_, state), _) = run_mesh(partial(straggle, steps=range(8)))

    outcomes = run_mesh(partial(straggle, steps=range(8, 10), state=state), num=3)

    for told, last in outcomes:
        assert told == 2 * [pytest.approx(1.65)]
        assert len(last["ranks"]) == 3
        assert len(last["ranks"][0]["compute"]["window"]) == 2


# -- the sampler --------------------------------------------------------------------


def epoch(
    rank: int,
    make_exchange: MakeExchange,
    *,
    steps: int,
    num: int,
    state: dict[str, Any] | None = None,
    number: int = 3,
) -> tuple[list[int], dict[str, Any] | None]:
    """Samples of an epoch of 24 in batches of 2, up to some step; the state then."""
    model = Vector()
    sampler = tailbound.ResamplingSampler(24, num_replicas=num, rank=rank, seed=5)
    sampler.set_epoch(number)
    data = TensorDataset(torch.arange(24.0).view(24, 1))
    used: list[int] = []
    with attach_through(make_exchange, model, plain_sgd(model)) as job:
        if state is not None:
            job.load_state_dict(state)
        batches = job.epoch(DataLoader(data, 2, sampler=sampler))
        for step, (batch,) in enumerate(batches, 1):
            for x in job.micro_batches(batch):
                used += [int(one) for one in x]
                job.backward(model(x))
            job.step()
            if step == steps:
                return used, job.state_dict()
    return used, None


@pytest.mark.parametrize("num", [2, 3, 1])
def test_an_epoch_goes_on_where_it_was_with_any_number_of_ranks(num: int) -> None:
    before = run_mesh(partial(epoch, steps=2, num=2))
    state = before[0][1]

    work = partial(epoch, steps=99, num=num, state=state)
    after = (
        run_mesh(work, num=num) if num > 1 else [work(0, lambda specs: LocalExchange())]
    )

    seen = sorted(index for used, _ in (*before, *after) for index in used)
    assert len(before[0][0]) == 4
    # 16 are left: among three ranks two of them come twice, to be evenly many.
    assert len(seen) == (26 if num == 3 else 24)
    assert sorted(set(seen)) == list(range(24))


def test_a_state_of_another_epoch_leaves_this_one_whole() -> None:
    ((_, state), _) = run_mesh(partial(epoch, steps=2, num=2))

    after = run_mesh(partial(epoch, steps=99, num=2, state=state, number=4))

    assert sorted(index for used, _ in after for index in used) == list(range(24))


def test_a_mesh_that_is_bad_on_purpose_goes_on_too() -> None:
    """State in the middle of lossy steps; replicas stay equal after the restart."""
    transport = Transport(
        mtu=1500,
        timeout_s=TIMEOUT_S,
        impairments=tailbound.Impairments(
            losses=(tailbound.IndependentLoss(rate=0.1),), seed=7
        ),
    )

    def work(
        rank: int, make_exchange: MakeExchange, state: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        torch_rng = torch.Generator().manual_seed(rank)
        model = Vector(20_000)
        with attach_through(make_exchange, model, plain_sgd(model, 0.1)) as job:
            if state is not None:
                job.load_state_dict(state)
            for _ in range(6):
                x = torch.randn(1, 20_000, generator=torch_rng)
                job.backward(model(x))
                job.step()
            return job.check_replicas(), job.state_dict()

    bound = LossBound(p_low=0.0, p_high=0.4, frequency=2, window=1, eta=0.5)
    first = run_mesh(work, bound=bound, transport=transport)
    second = run_mesh(
        partial(work, state=first[0][1]), bound=bound, transport=transport
    )

    assert second[0] == second[1]
    assert second[0][1]["step"] == 12

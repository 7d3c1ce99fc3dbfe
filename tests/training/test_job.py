"""The job object, on ranks that are threads around a real server."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import tailbound
from tailbound.config import LossBound, Transport
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    JobClosedError,
    RemoteError,
    TailboundError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.records import Record, RoundReport, StepReport, from_line, to_line
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.buckets import state_bytes
from tailbound.training.job import Job
from training.ranks import (
    EXACT,
    TIMEOUT_S,
    Vector,
    build_mlp,
    finish,
    meet_at,
    open_sockets,
    plain_sgd,
    run_ranks,
    start_ranks,
)


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def samples(num: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(num, 3, generator=rng), torch.randn(num, 1, generator=rng)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


# -- the mean -------------------------------------------------------------------------


@pytest.mark.sockets
def test_three_steps_equal_those_of_one_process_with_all_samples() -> None:
    """Ranks have 5 and 2 samples, in micro-batches of 2, 2, 1 and of 1, 1."""
    x, y = samples(7)
    parts = ((x[:5], y[:5]), (x[5:], y[5:]))
    models = [build_mlp(rank) for rank in range(2)]
    alone = build_mlp(0)

    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = models[rank]
        with attach_through(
            make_exchange, model, plain_sgd(model, 0.1), micro_batches=3
        ) as job:
            for _ in range(3):
                for part_x, part_y in job.micro_batches(parts[rank]):
                    job.backward(mse(model(part_x), part_y), weight=len(part_x))
                job.step()
            job.check_replicas()

    assert run_ranks(work) == [None, None]

    optimizer = plain_sgd(alone, 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(mse(alone(x), y))
        optimizer.step()
    for one, other in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)


@pytest.mark.sockets
@pytest.mark.parametrize(
    ("weights", "gradient"),
    [
        # S04: tokens 4 | 1 1 1 on rank 0, ten 2s | 8 8 on rank 1: a token mean
        (((1.0, 3.0), (10.0, 2.0)), 2.6875),  # 43 / 16; a mean of means is 3.75
        (((1.0, 3.0), (10.0, 0.0)), 27 / 14),
        (((1.0, 3.0), (0.0, 0.0)), 7 / 4),
    ],
)
def test_the_gradient_is_the_weighted_mean_over_all_ranks(
    weights: tuple[tuple[float, float], ...], gradient: float
) -> None:
    means = ((4.0, 1.0), (2.0, 8.0))

    def work(rank: int, make_exchange: MakeExchange) -> list[float]:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            for mean, weight in zip(means[rank], weights[rank], strict=True):
                job.backward(model(torch.tensor([[mean]])), weight=weight)
            report = job.step()
        assert report.weight == sum(weights[rank])
        assert report.total_weight == sum(map(sum, weights))
        return [-model.w.item(), report.norm]

    for outcome in run_ranks(work):
        assert outcome == pytest.approx([gradient, gradient], abs=1e-6)


@pytest.mark.sockets
def test_a_model_of_two_dtypes_reduces_each_in_its_own() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Any]:
        wide, narrow = Vector(2), Vector(1, torch.bfloat16)
        model = nn.ModuleList([wide, narrow])
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            loss = wide(torch.tensor([[1.0, 4.0 * rank]]))
            job.backward(loss + narrow(torch.tensor([[8.0 * rank]])).float())
            report = job.step()
            rounds = [(one.bucket, one.num_bytes, one.direction) for one in job.rounds]
        return [wide.w.tolist(), narrow.w.item(), report.norm, rounds]

    rounds = [(0, 2, "in"), (0, 2, "back"), (1, 8, "in"), (1, 8, "back")]
    # The norm of all buckets: sqrt(1 + 4 + 16).
    expected = [[-1.0, -2.0], -4.0, pytest.approx(math.sqrt(21.0)), rounds]
    assert run_ranks(work) == [expected, expected]


@pytest.mark.sockets
def test_replicas_stay_equal_bit_for_bit_over_a_lossy_network() -> None:
    models = [build_mlp(rank) for rank in range(2)]
    x, y = samples(8)

    def work(rank: int, make_exchange: MakeExchange) -> list[str]:
        model = models[rank]
        digests = []
        with attach_through(make_exchange, model, plain_sgd(model, 0.1)) as job:
            for step in range(4):
                rows = slice(step + rank, step + rank + 3)
                job.backward(mse(model(x[rows]), y[rows]))
                job.step()
                digests.append(job.check_replicas())
        return digests

    lossy = Transport(
        mtu=576,
        timeout_s=TIMEOUT_S,
        impairments=Impairments(losses=(IndependentLoss(rate=0.3),), seed=3),
    )
    first, second = run_ranks(
        work, bound=LossBound(p_low=0.0, p_high=0.4), transport=lossy
    )

    assert first == second
    assert len(set(first)) == 4
    assert state_bytes(models[0]) == state_bytes(models[1])


# -- attaching ------------------------------------------------------------------------


@pytest.mark.sockets
def test_parameters_and_buffers_are_made_equal_to_rank_0s() -> None:
    linears = [nn.Linear(2, 2) for _ in range(2)]
    norms = [nn.BatchNorm1d(2) for _ in range(2)]
    with torch.no_grad():
        linears[0].bias.fill_(3.0)
        norms[0].get_buffer("num_batches_tracked").fill_(9)

    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = nn.Sequential(linears[rank], norms[rank])
        attach_through(make_exchange, model, plain_sgd(model)).close()

    assert run_ranks(work) == [None, None]
    assert linears[1].bias.tolist() == [3.0, 3.0]
    assert norms[1].get_buffer("num_batches_tracked").item() == 9
    assert state_bytes(linears[0]) == state_bytes(linears[1])


@pytest.mark.sockets
def test_a_rank_attaches_to_a_server_that_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 the user's way, from the environment; rank 0 by hand, in a thread."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    transport = Transport(mtu=1500, timeout_s=TIMEOUT_S)
    server = tailbound.Server(2, transport=transport)
    models = [Vector(), Vector()]

    def one_step(job: Job) -> None:
        with job:
            job.backward(models[job.rank](torch.tensor([[1.0 + job.rank]])))
            job.step()

    def be_rank_0() -> None:
        make_exchange = meet_at(server, 0, 2, LossBound(), transport)
        one_step(attach_through(make_exchange, models[0], plain_sgd(models[0])))

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(server.run), pool.submit(be_rank_0)]
        one_step(
            tailbound.attach(
                models[1],
                plain_sgd(models[1]),
                transport=replace(transport, plan="server", server=server.address),
            )
        )
        assert [other.result(TIMEOUT_S) for other in others] == [None, None]

    assert [model.w.item() for model in models] == [-1.5, -1.5]


@pytest.mark.sockets
def test_models_that_differ_are_refused_on_every_rank() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = Vector()
        model.register_buffer("seen", torch.zeros(rank + 1))
        attach_through(make_exchange, model, plain_sgd(model))

    for outcome in run_ranks(work):
        assert isinstance(outcome, HandshakeError)
        assert "seen [1] float32 (rank 0) here, seen [2] float32 (rank 1)" in str(
            outcome
        )


def test_a_compute_bound_is_one_of_its_own_kind() -> None:
    model = Vector()

    with pytest.raises(ConfigError, match=r"a tailbound.ComputeBound or None, not 0.5"):
        tailbound.attach(model, plain_sgd(model), compute=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [0, -1, 2.0])
def test_the_number_of_micro_batches_is_a_whole_one(num: Any) -> None:
    model = Vector()

    with pytest.raises(ConfigError, match="micro_batches is 1 or more"):
        tailbound.attach(model, plain_sgd(model), micro_batches=num)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_around_a_part_of_the_model_is_refused(process_group: None) -> None:
    model = nn.Sequential(nn.parallel.DistributedDataParallel(Vector()))

    with pytest.raises(ConfigError, match="wrap the whole model or nothing"):
        tailbound.attach(model, plain_sgd(model))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    optimizer = torch.optim.SGD([*Vector().parameters()], lr=1.0)

    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        tailbound.attach(Vector(), optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        partial(torch.optim.AdamW, betas=(0.9, 0.95)),
        partial(torch.optim.RMSprop, momentum=0.9),
    ],
)
def test_momentum_of_the_senders_and_of_the_optimizer_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    model = Vector()
    bound = LossBound(holes="residual", residual_momentum=0.9)

    with pytest.raises(ConfigError, match=r"the optimizer's momentum of 0\.9 would"):
        tailbound.attach(model, optimizer(model.parameters()), network=bound)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1.0),
        partial(torch.optim.AdamW, betas=(0.0, 0.95)),
        torch.optim.Adagrad,
    ],
)
def test_a_job_of_one_has_no_senders_to_apply_momentum(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    model = Vector()
    bound = LossBound(holes="residual", residual_momentum=0.9)

    with pytest.raises(ConfigError, match="a job of one sends none"):
        tailbound.attach(model, optimizer(model.parameters()), network=bound)


def test_exact_averaging_needs_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Vector()

    with pytest.raises(ConfigError, match="init_process_group first"):
        tailbound.attach(model, plain_sgd(model), network=None)


@pytest.mark.sockets
def test_with_a_residual_a_gradient_is_late_and_not_lost() -> None:
    """Half of each round may be missing; then 20 gradients of zero bring what is owed.

    Five gradients of 3 and 5 each, so each weight ends at -20 to the bit.
    """
    bound = LossBound(p_low=0.5, p_high=0.5, holes="residual")
    transport = Transport(
        mtu=1500,
        timeout_s=TIMEOUT_S,
        impairments=Impairments(losses=(IndependentLoss(rate=0.3),)),
    )

    def work(rank: int, make_exchange: MakeExchange) -> tuple[int, list[float]]:
        model = Vector(4000)
        missing = 0
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            for step in range(25):
                value = (3.0, 5.0)[rank] if step < 5 else 0.0
                job.backward(model(torch.full((1, 4000), value)))
                report = job.step()
                missing += report.missing_share > 0
            job.check_replicas()
        return missing, sorted(set(model.w.tolist()))

    first, second = run_ranks(work, bound=bound, transport=transport)

    assert first[0] > 0
    assert (first[1], second[1]) == ([-20.0], [-20.0])


# -- one rank -------------------------------------------------------------------------


def test_a_job_of_one_rank_trains_without_a_socket() -> None:
    model = Vector()
    before = open_sockets()

    job = tailbound.attach(model, plain_sgd(model), micro_batches=2)
    for x in job.micro_batches(torch.tensor([[1.0], [5.0]])):
        job.backward(model(x))
    report = job.step()

    assert open_sockets() == before
    job.close()
    assert model.w.item() == -3.0
    assert (job.rank, job.world_size) == (0, 1)
    assert (report.norm, report.verdict, report.missing_share) == (3.0, "exact", 0.0)


def local_job(model: nn.Module, **settings: Any) -> Job:
    return tailbound.attach(model, plain_sgd(model), **settings)


def test_a_step_without_micro_batches_is_skipped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Vector()
    with caplog.at_level(logging.WARNING), local_job(model) as job:
        reports = [job.step(), job.step()]
        job.backward(model(torch.tensor([[2.0]])))
        reports.append(job.step())

    assert [report.skipped for report in reports] == [True, True, False]
    assert [report.step for report in reports] == [1, 2, 3]
    assert [report.total_weight for report in reports] == [0.0, 0.0, 1.0]
    assert model.w.item() == -2.0
    assert [record.message[:15] for record in caplog.records] == ["step 1 skipped:"]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0])
def test_a_weight_that_is_no_amount_is_refused(weight: float) -> None:
    model = Vector()
    with local_job(model) as job:
        with pytest.raises(ConfigError, match=f"finite and >= 0, not {weight}"):
            job.backward(model(torch.tensor([[1.0]])), weight=weight)

        assert model.w.grad is None


def test_a_micro_batch_of_weight_0_leaves_no_trace() -> None:
    model = Vector()
    with local_job(model) as job:
        job.backward(model(torch.tensor([[math.nan]])), weight=0.0)
        job.backward(model(torch.tensor([[2.0]])))
        report = job.step()

    assert model.w.item() == -2.0
    assert (report.weight, report.loss) == (1.0, 0.0)


def test_a_closed_job_refuses_to_go_on() -> None:
    model = Vector()
    job = local_job(model)
    job.close()
    job.close()
    job.abort("too late")

    with pytest.raises(JobClosedError, match="attach again"):
        job.backward(model(torch.tensor([[1.0]])))
    with pytest.raises(JobClosedError):
        job.step()
    with pytest.raises(JobClosedError):
        job.check_replicas()


def test_gradients_are_cleared_after_each_step() -> None:
    model = Vector()
    with local_job(model) as job:
        for x in (2.0, 3.0):
            job.backward(model(torch.tensor([[x]])))
            job.step()
            assert model.w.grad is None

    assert model.w.item() == -5.0


def test_the_loss_told_is_the_weighted_mean() -> None:
    model = Vector()
    with torch.no_grad():
        model.w.fill_(1.0)
    with local_job(model) as job:
        job.backward(model(torch.tensor([[2.0]])), weight=3.0)
        job.backward(model(torch.tensor([[6.0]])), weight=1.0)

        assert job.step().loss == 3.0
        assert job.step().loss is None


def test_a_diverged_step_still_makes_a_record() -> None:
    model = Vector()
    records: list[Record] = []
    with local_job(model, on_record=records.append) as job:
        job.backward(model(torch.tensor([[math.inf]])) * math.nan)
        job.step()

    (report,) = records
    again = from_line(to_line(report))
    assert isinstance(again, StepReport)
    assert again.loss is None
    assert math.isnan(again.norm)


def test_an_optimizer_without_a_learning_rate_will_do() -> None:
    model = Vector()
    optimizer = plain_sgd(model)
    with tailbound.attach(model, optimizer) as job:
        rate = optimizer.param_groups[0].pop("lr")
        step = job.step()
        optimizer.param_groups[0]["lr"] = rate

    assert step.skipped


def test_the_process_groups_place_is_taken(process_group: None) -> None:
    with local_job(Vector(), network=None) as job:
        assert (job.rank, job.world_size) == (0, 1)


# -- what is told ---------------------------------------------------------------------


@pytest.mark.sockets
def test_every_round_and_step_is_told_with_its_run_and_step() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[Record]:
        model = Vector(3)
        records: list[Record] = []
        with attach_through(
            make_exchange,
            model,
            plain_sgd(model),
            on_record=records.append,
            run="adaptive",
        ) as job:
            for _ in range(2):
                job.backward(model(torch.ones(1, 3)))
                job.step()
        return records

    for rank, records in enumerate(run_ranks(work, bound=LossBound.fixed(0.25))):
        assert [type(record) for record in records] == 2 * [
            RoundReport,
            RoundReport,
            StepReport,
        ]
        assert [record.step for record in records] == [1, 1, 1, 2, 2, 2]
        assert {record.run for record in records} == {"adaptive"}
        assert {record.rank for record in records} == {rank}
        assert [one.direction for one in records if isinstance(one, RoundReport)] == [
            "in",
            "back",
            "in",
            "back",
        ]
        step = records[-1]
        assert isinstance(step, StepReport)
        assert (step.p, step.weight, step.total_weight) == (0.25, 1.0, 2.0)


@pytest.mark.sockets
def test_replicas_that_differ_are_named() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> str:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            if rank == 1:
                with torch.no_grad():
                    model.w.fill_(2.0)
            try:
                job.check_replicas()
            except TailboundError as error:
                return str(error)
        return ""

    first, second = run_ranks(work)

    assert first == second
    assert first.startswith("replicas differ after step 0 (rank 0: ")
    assert "something other than job.step() change" in first


@pytest.mark.sockets
def test_an_error_on_one_rank_ends_the_others_with_its_name() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            if rank == 1:
                raise RuntimeError("out of memory\n  in micro-batch 2")
            job.step()

    first, second = run_ranks(work)

    assert isinstance(second, RuntimeError)
    assert isinstance(first, RemoteError)
    assert str(first) == (
        "rank 1 ended the job: RuntimeError: out of memory in micro-batch 2"
    )


@pytest.mark.sockets
def test_a_failed_job_stays_failed() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> list[str]:
        model = Vector()
        job = attach_through(make_exchange, model, plain_sgd(model))
        if rank == 1:
            job.abort("enough")
            raise InterruptedError
        told = []
        for _ in range(2):
            with pytest.raises(RemoteError) as caught:
                job.step()
            told.append(str(caught.value))
        job.close()
        return told

    assert run_ranks(work, bound=EXACT)[0] == 2 * ["rank 1 ended the job: enough"]


# -- real processes -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
def test_both_networks_equal_one_process_with_all_samples() -> None:
    """Over a process group, exactly, and then bounded, met in the group's store."""
    x, y = samples(7)
    alone = build_mlp(0)
    optimizer = plain_sgd(alone, 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(mse(alone(x), y))
        optimizer.step()

    results = finish(start_ranks("networks"))

    assert [code for code, *_ in results] == [0, 0], results
    first, second = (json.loads(out) for _, out, _ in results)
    assert first == second
    for network in ("exact", "bounded"):
        for mean, parameter in zip(first[network], alone.parameters(), strict=True):
            assert mean == pytest.approx(parameter.flatten().tolist(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
def test_a_script_that_forgets_to_close_does_not_end_the_others() -> None:
    results = finish(start_ranks("forgotten"))

    assert [(code, out.strip()) for code, out, _ in results] == 2 * [(0, "[-1.0]")]

"""FIELD.md's cases of the hook: S07 to S11, A02 to A04 and A12.

Ranks that DDP needs are two processes, which go through all cases once; what they must
find stands here. The rest are threads or endpoints in memory.
"""

import copy
import json
import math
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field.dropping import losing
from tailbound.config import ComputeBound, LossBound, Transport
from tailbound.errors import RemoteError
from tailbound.protocol.events import Direction, Reduced
from tailbound.protocol.messages import BucketSpec
from tailbound.testing import FakeMesh
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.training.hook import bounded_allreduce, ddp_state
from training.fakes import HandClock
from training.mesh_ranks import run_mesh
from training.ranks import (
    TIMEOUT_S,
    Vector,
    finish,
    open_sockets,
    plain_sgd,
    start_ranks,
)
from training.test_hook import OneBucket

CASES = (
    *("s07", "s07_lossy", "s08", "s09", "s09_lossy", "s10_hole", "s10_mean"),
    *("s11", "s11_exact", "a02", "a03", "a12"),
)
Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told() -> Told:
    """What each of both ranks found, case by case."""
    outcomes = finish(start_ranks(*CASES, script="../field/hook_case_ranks.py"))
    for code, _, errors in outcomes:
        if code:
            pytest.fail(errors[-2000:])
    return [json.loads(output) for _, output, _ in outcomes]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
class TestInProcesses:
    """With DDP on two ranks; the first test waits for all cases."""

    def test_s07_ddp_lays_out_its_buckets_anew_and_gradients_stay_its_own(
        self, told: Told
    ) -> None:
        for rank in told:
            calls = rank["s07"]["calls"]
            assert calls[0] == [[0, 2672]]
            assert calls[0] != calls[1] == calls[2]
            assert [sum(num for _, num in step) for step in calls] == [2672] * 3
            assert len(rank["s07"]["differences"]) == 3
            assert max(rank["s07"]["differences"]) <= 1e-6

    def test_s07_nothing_of_a_lossy_step_is_left_over_for_the_next(
        self, told: Told
    ) -> None:
        for rank in told:
            # 2 of the 10 or 11 chunks that a rank sends.
            assert rank["s07_lossy"]["missing"] == [2, 0]
            first, second = rank["s07_lossy"]["differences"]
            assert first > 1e-3
            assert second <= 1e-6

    def test_s08_a_hook_goes_on_under_the_loss_bound_that_it_had(
        self, told: Told
    ) -> None:
        for rank in told:
            assert rank["s08"]["before"] == 3 * [0.1] + 7 * [0.6]
            assert rank["s08"]["step"] == 11
            assert rank["s08"]["after"] == [0.6]

    @pytest.mark.parametrize(("case", "missing"), [("s09", 0), ("s09_lossy", 8)])
    def test_s09_only_parameters_that_some_rank_used_have_a_gradient(
        self, told: Told, case: str, missing: int
    ) -> None:
        for rank in told:
            found = rank[case]
            assert found["grad"] == [False, False, True, True]  # is None: A's, B's
            assert found["kept"] == [True]
            assert found["b"] == 0.0  # to rank 1's gradient / 2
            assert found["buckets"] == ["bb", "aa", "bb", "aa"]
            # 4 of 39 chunks in each of the two steps.
            assert found["missing"] == {"aa": missing, "bb": 0}
        assert told[0][case]["digest"] == told[1][case]["digest"]

    def test_s10_an_inf_that_is_given_up_is_given_up_for_all_ranks(
        self, told: Told
    ) -> None:
        assert told[0]["s10_hole"] == told[1]["s10_hole"]
        found = told[0]["s10_hole"]
        assert found["scales"] == [65536, 131072, 131072, 262144, 262144, 524288]
        assert found["skipped"] == 0
        assert len(set(found["digests"])) == 6

    def test_s10_an_inf_in_a_mean_that_is_lost_on_its_way_back_reaches_all_ranks(
        self, told: Told
    ) -> None:
        assert told[0]["s10_mean"] == told[1]["s10_mean"]
        found = told[0]["s10_mean"]
        assert found["scales"] == [32768, 16384, 8192, 4096, 2048, 1024]
        assert found["skipped"] == 6
        assert len(set(found["digests"])) == 1

    def test_s11_elements_travel_in_their_own_width_and_undivided(
        self, told: Told
    ) -> None:
        """1001 elements; 1399 bytes of a datagram hold 699 halves or 349 singles."""
        for rank in told:
            assert rank["s11"] == {
                "torch.bfloat16": [[2.0], "torch.bfloat16", 2002, 1398],
                "torch.float16": [[2.0], "torch.float16", 2002, 1398],
                "torch.float32": [[2.0], "torch.float32", 4004, 1396],
            }

    def test_s11_the_exact_path_takes_bfloat16_too(self, told: Told) -> None:
        for rank in told:
            assert rank["s11_exact"] == [[-2.0], "torch.bfloat16"]

    def test_a02_fifty_steps_of_four_buckets_under_a_wrapper_never_wait_in_a_callback(
        self, told: Told
    ) -> None:
        for rank in told:
            # One bucket in the first step, four in each of the others.
            assert rank["a02"] == {"calls": 197, "sampled": True, "waits": 0}

    @pytest.mark.parametrize("is_view", ["False", "True"])
    def test_a03_what_the_hook_returns_is_the_bucket_itself(
        self, told: Told, is_view: str
    ) -> None:
        for rank in told:
            differences, calls, is_bucket = rank["a03"][is_view]
            assert len(differences) == 5
            assert max(differences) <= 1e-6
            assert calls == 9  # 1 bucket, then 2 in each step
            assert is_bucket

    def test_a12_hooks_at_different_steps_refuse_each_other_in_their_first_round(
        self, told: Told
    ) -> None:
        words = sorted(rank["a12"].partition(": ")[0] for rank in told)
        assert words[0] == "HandshakeError"
        assert words[1] in ("HandshakeError", "RemoteError")
        for rank in told:
            assert "step differs: " in rank["a12"]
            assert "7 (rank 0)" in rank["a12"]
            assert "8 (rank 1)" in rank["a12"]


# -- S07: data that comes before its announcement -----------------------------------


def test_s07_a_bucket_that_shrank_is_not_taken_for_the_one_of_the_step_before() -> None:
    """The first shard is as it was: all of it comes before the length is known.

    800 and 740 float32 are chunks of 362, 362 and a rest, which is the second shard.
    """
    mesh = FakeMesh(2, LossBound.fixed(0.0))
    mesh.start()
    for step, num in enumerate((800, 740, 800), 1):
        values = [np.full(num, value, np.float32) for value in (1.0, 3.0)]
        mesh.begin(values, [1.0, 1.0], ranks=[1], step=step)
        mesh.deliver()
        mesh.begin(values, [1.0, 1.0], ranks=[0], step=step)
        mesh.run_until(Reduced)

        assert [np.unique(mean).tolist() for mean in values] == [[2.0], [2.0]]


# -- S08: a checkpoint of the job ---------------------------------------------------

AUTO = ComputeBound(warmup_steps=2, calibration_steps=4, retune_every=50, max_drop=0.2)
PHASES = LossBound(p_low=0.1, p_high=0.6, frequency=3)


def learn(
    rank: int,
    make_exchange: MakeExchange,
    *,
    steps: int,
    state: dict[str, Any] | None = None,
) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Ranks take turns to be slow; the state as loaded, or after the steps; each step.

    Gradients are 1, and 2 from step 7 on: norms settle, and one check sees a jump.
    """
    hand = HandClock()
    model = Vector()
    told = []
    with attach_through(
        make_exchange,
        model,
        plain_sgd(model),
        micro_batches=5,
        compute=AUTO,
        clock=hand.clock(),
    ) as job:
        if state is not None:
            job.load_state_dict(state)
        begun = [job.num_steps, job.threshold_s, job.state_dict()]
        for _ in range(steps):
            for number, x in enumerate(job.micro_batches(iter(torch.ones(99, 1)))):
                job.backward(model(x))
                is_slow = number in (1, 3) and job.num_steps % 2 == rank
                hand.pass_s(1.5 if is_slow else 0.1)
            threshold_s = job.threshold_s
            report = job.step()
            told.append((report.step, report.p, report.norm, threshold_s))
        return begun, job.state_dict(), told


LOADS = """
import json, sys, torch
print(json.dumps(torch.load(sys.argv[1], weights_only=True)))
"""


@pytest.mark.sockets
@pytest.mark.slow
def test_s08_a_job_goes_on_with_all_that_it_had_learned(tmp_path: Path) -> None:
    ((_, state, told), (_, other, _)) = run_mesh(partial(learn, steps=10), bound=PHASES)
    path = tmp_path / "state.pt"
    torch.save(state, path)
    loaded = json.loads(
        subprocess.run(
            [sys.executable, "-c", LOADS, str(path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30.0,
        ).stdout
    )
    resumed = run_mesh(partial(learn, steps=1, state=loaded), bound=PHASES)

    assert path.stat().st_size < 1_000_000
    assert state == other == copy.deepcopy(state) == pickle.loads(pickle.dumps(state))
    assert told[-1] == (10, 0.6, 1.0, pytest.approx(1.65))
    assert state["regime"]["critical"] is False
    assert state["regime"]["history"][-1] == [1.0]
    assert [len(rank["compute"]["window"]) for rank in state["ranks"]] == [4, 4]
    for begun, _, after in resumed:
        # Step count, tau, window, regime and last norm, all equal; no new warm-up.
        assert begun[:2] == [10, pytest.approx(1.65)]
        assert json.loads(json.dumps(begun[2])) == loaded
        assert after == [(11, 0.6, 1.0, pytest.approx(1.65))]


@pytest.mark.sockets
@pytest.mark.slow
def test_s08_with_three_ranks_what_single_ranks_measured_is_left_out() -> None:
    ((_, state, _), _) = run_mesh(partial(learn, steps=10), bound=PHASES)

    resumed = run_mesh(partial(learn, steps=1, state=state), bound=PHASES, num=3)

    assert len(resumed) == 3
    for begun, _, after in resumed:
        assert begun[:2] == [10, pytest.approx(1.65)]
        assert begun[2]["regime"] == state["regime"]
        assert [len(rank["compute"]["window"]) for rank in begun[2]["ranks"]] == [0] * 3
        assert after[0][:2] == (11, 0.6)
        assert after[0][3] == pytest.approx(1.65)


def test_s08_a_hooks_state_is_copied_and_pickled() -> None:
    state = ddp_state(network=PHASES)
    state.step = 10

    twins = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]

    assert [twin.step for twin in twins] == [10, 10]
    assert [twin.network for twin in twins] == [PHASES, PHASES]


# -- A04: sums of float16 -----------------------------------------------------------


def reduce_30000(rank: int, make_exchange: MakeExchange) -> list[float]:
    """4 ranks of 4 shards of 4 chunks, 724 float16 each; the mean's values."""
    num = 4 * 4 * 724
    exchange = make_exchange((BucketSpec("float16", ("w",), ((num,),)),))
    values = np.full(num, 30000.0, np.float16)
    exchange.all_reduce(
        torch.from_numpy(values),
        values,
        1.0,
        learning_rate=None,
        loss_scale=1.0,
        computed=1.0,
        planned=1,
        is_last=True,
    )
    exchange.close()
    return [float(value) for value in np.unique(values)]


def first_of_rank_3(header: np.void, data: bytes) -> bool:
    is_hit = header["kind"] == Direction.IN and header["rank"] == 3
    return bool(is_hit and header["sequence"] == 0)


@pytest.mark.sockets
@pytest.mark.parametrize(
    ("holes", "loses", "expected"),
    [
        ("zero", False, [30000.0]),
        ("received_mean", True, [30000.0]),
        # A hole is zero: 3 * 30000 / 4 = 22500, of which float16 has 22496.
        ("zero", True, [22496.0, 30000.0]),
    ],
)
def test_a04_four_times_30000_in_float16_stays_finite(
    holes: Any, loses: bool, expected: list[float]
) -> None:
    bound = LossBound(p_low=0.25, p_high=0.25, holes=holes)
    transport = Transport(mtu=1500, timeout_s=TIMEOUT_S)

    with losing(first_of_rank_3 if loses else lambda header, data: False):
        outcomes = run_mesh(reduce_30000, num=4, bound=bound, transport=transport)

    assert outcomes == [expected] * 4


# -- A12: the odd one out -----------------------------------------------------------


def test_a12_round_7_never_mixes_with_round_8() -> None:
    """The rank that is ahead knows of no such round, and ends the job."""
    mesh = FakeMesh(2, LossBound.fixed(0.0), first_counter=[7, 8], timeout_s=1.0)
    mesh.start()
    values = [np.full(1000, 1.0, np.float32), np.full(1000, 3.0, np.float32)]

    with pytest.raises(RemoteError) as caught:
        mesh.all_reduce(values, [1.0, 1.0])

    assert "rank 1 ended the job: rank 0 sent round 7 after 1 rounds" in str(
        caught.value
    )
    assert [float(np.unique(one).item()) for one in values] == [1.0, 3.0]


def test_a12_a_hook_of_one_rank_returns_its_input_and_opens_no_socket() -> None:
    state = ddp_state()
    buffer = torch.tensor([1.0, math.inf, -2.0])
    sockets, threads = open_sockets(), threading.active_count()

    future = bounded_allreduce(state, OneBucket(buffer))  # type: ignore[arg-type]

    assert future.value() is buffer
    assert buffer.tolist() == [1.0, math.inf, -2.0]
    assert open_sockets() == sockets
    assert threading.active_count() == threads

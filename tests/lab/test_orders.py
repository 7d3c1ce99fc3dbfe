"""What the demo tells its processes: each one's impairments, and the JSON form."""

import msgspec
import pytest

from tailbound.config import ComputeBound, LossBound
from tailbound.impairments import BurstLoss, IndependentLoss
from tailbound.lab.orders import (
    Answer,
    Broken,
    Conditions,
    Done,
    Ready,
    ServerOrder,
    WorkerOrder,
)
from tailbound.records import EpochReport, ThresholdReport
from tailbound.report.outcome import Stragglers

BAD = Conditions(
    rtt_ms=3.0, loss=0.02, burst=0.7, burst_rounds=(9, 20), mtu=1500, seed=4
)


def test_bursts_strike_at_the_server_and_background_loss_everywhere() -> None:
    background = IndependentLoss(rate=0.02)

    assert BAD.impairments(0).losses == (
        background,
        BurstLoss(rate=0.7, rounds=(9, 20)),
    )
    assert BAD.impairments(1).losses == (background,)


def test_half_the_round_trip_passes_on_each_way() -> None:
    assert [BAD.impairments(one).delay_s for one in (0, 1)] == [0.0015, 0.0015]


def test_every_process_draws_its_own_losses_the_same_in_each_run() -> None:
    assert [BAD.impairments(one).seed for one in (0, 1, 2)] == [4000, 4001, 4002]


def test_a_good_network_impairs_nothing() -> None:
    good = Conditions(
        rtt_ms=0.0, loss=0.0, burst=0.0, burst_rounds=(9,), mtu=1500, seed=0
    )

    assert good.impairments(0).is_none
    assert good.impairments(1).is_none


@pytest.mark.parametrize(
    "order",
    [
        ServerOrder(run="fixed", world_size=3, timeout_s=30.0, conditions=BAD),
        WorkerOrder(
            run="adaptive",
            server="127.0.0.1:7000",
            task="text",
            data="a file",
            epochs=2,
            batch_size=8,
            bound=LossBound(window=5),
            timeout_s=30.0,
            conditions=BAD,
        ),
        WorkerOrder(
            run="both",
            task="digits",
            data=None,
            epochs=2,
            batch_size=48,
            bound=LossBound.fixed(0.0),
            compute=ComputeBound(max_drop=0.1, preempt="backward"),
            stragglers=Stragglers(
                micro_batches=12, micro_batch_s=0.004, max_drop=0.1, preempt="backward"
            ),
            timeout_s=30.0,
            conditions=BAD,
        ),
    ],
)
def test_an_order_comes_out_of_json_as_it_went_in(
    order: ServerOrder | WorkerOrder,
) -> None:
    line = msgspec.json.encode(order)

    assert b"\n" not in line
    assert msgspec.json.decode(line, type=type(order)) == order


@pytest.mark.parametrize(
    "answer",
    [
        Ready("127.0.0.1:7000"),
        Done(),
        Broken("no\nway"),
        EpochReport(
            rank=0,
            epoch=1,
            step=2,
            metric=0.5,
            metric_name="accuracy",
            train_s=1.0,
            digest="ab",
        ),
        ThresholdReport(
            rank=1,
            step=14,
            threshold_s=0.07,
            predicted_step_s=0.08,
            predicted_speedup=1.1,
            predicted_drop=0.09,
            calibration_step_s=0.1,
            realised_step_s=None,
            realised_speedup=None,
            dropped_share_W=(0.0, 0.0),
            relative_score_W=(1.0, 0.9),
            individual_score_W=(1.0, 1.0),
            persistent_stragglers=(),
            verdict="bounded",
        ),
    ],
)
def test_an_answer_says_what_it_is(answer: Answer) -> None:
    line = msgspec.json.encode(answer)

    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Answer) == answer

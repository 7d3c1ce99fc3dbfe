"""Simulated latencies: base, noise and stragglers, in whatever blocks."""

import numpy as np
import pytest

from tailbound.compute.latencies import (
    STRAGGLERS,
    LatencyStream,
    Stragglers,
    Workload,
)
from tailbound.compute.noise import LogNormalNoise, NormalNoise
from tailbound.errors import ConfigError

STILL = NormalNoise(0.0, 0.0)


def stream(workload: Workload, *, num_micro_batches: int = 3) -> LatencyStream:
    return LatencyStream(workload, num_micro_batches, np.random.SeedSequence(5))


@pytest.mark.parametrize("name", ["uniform", "one_server"])
def test_blocks_of_workers_and_steps_are_pieces_of_one_job(name: str) -> None:
    workload = Workload(LogNormalNoise(), 0.45, STRAGGLERS[name])
    whole_SWM = stream(workload).draw(4, 20)
    in_parts = stream(workload)

    two_steps = in_parts.draw(2, 20)
    third = [in_parts.draw(1, 7), in_parts.draw(1, 13, first_worker=7)]
    fourth = [
        in_parts.draw(1, 9),
        in_parts.draw(1, 9, first_worker=9),
        in_parts.draw(1, 2, first_worker=18),
    ]

    assert np.array_equal(whole_SWM[:2], two_steps)
    assert np.array_equal(whole_SWM[2:3], np.concatenate(third, axis=1))
    assert np.array_equal(whole_SWM[3:], np.concatenate(fourth, axis=1))


def test_without_noise_and_stragglers_each_takes_the_base() -> None:
    latency_s_SWM = stream(Workload(STILL, 0.45)).draw(2, 4)

    assert latency_s_SWM.shape == (2, 4, 3)
    assert (latency_s_SWM == 0.45).all()


def test_a_micro_batch_takes_no_negative_time() -> None:
    latency_s_SWM = stream(Workload(NormalNoise(-1.0, 0.5), 0.45)).draw(10, 100)

    assert latency_s_SWM.min() == 0.0
    assert latency_s_SWM.max() > 0.0


def test_uniform_stragglers_wait_a_second_in_four_of_a_hundred() -> None:
    latency_s_SWM = stream(Workload(STILL, 0.5, STRAGGLERS["uniform"])).draw(500, 32)

    assert set(latency_s_SWM.ravel().tolist()) == {0.5, 1.5}
    assert (latency_s_SWM > 1.0).mean() == pytest.approx(0.04, abs=0.003)
    assert (latency_s_SWM > 1.0).any(axis=(0, 2)).all()


def test_one_server_s_stragglers_are_as_many_and_all_on_it() -> None:
    latency_s_SWM = stream(Workload(STILL, 0.5, STRAGGLERS["one_server"])).draw(500, 32)

    waits_SWM = latency_s_SWM > 1.0
    assert waits_SWM.mean() == pytest.approx(0.04, abs=0.003)
    assert waits_SWM[:, :8].any(axis=(0, 2)).all()
    assert not waits_SWM[:, 8:].any()


def test_a_job_smaller_than_the_server_is_all_on_it() -> None:
    always = Stragglers(chance=1.0, delay_s=2.0, num_workers=8)

    latency_s_SWM = stream(Workload(STILL, 0.5, always)).draw(1, 3)

    assert (latency_s_SWM == 2.5).all()


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chance is a share in \[0, 1\], not 1\.5"):
        Stragglers(chance=1.5)
    with pytest.raises(ConfigError, match=r"delay_s is 0 or more, not -1\.0"):
        Stragglers(delay_s=-1.0)
    with pytest.raises(ConfigError, match="num_workers is 1 or more, not 0"):
        Stragglers(num_workers=0)
    with pytest.raises(ConfigError, match=r"base_s is above 0, not 0\.0"):
        Workload(STILL, 0.0)

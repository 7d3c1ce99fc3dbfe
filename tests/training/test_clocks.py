"""The two clocks of compute, on times that the tests set."""

import pytest
import torch

from tailbound.training.clocks import CpuClock, EventClock, make_clock
from training.fakes import FakeDevice, HandClock


def test_a_step_on_the_cpu_is_its_micro_batches() -> None:
    hand = HandClock()
    clock = hand.clock()

    hand.pass_s(7.0)  # before the step: not counted
    clock.begin()
    hand.pass_s(0.25)
    clock.mark()
    hand.pass_s(0.5)
    clock.mark()
    hand.pass_s(0.125)

    assert clock.latency_s() == (0.25, 0.5)
    assert clock.elapsed_s() == 0.875


def test_a_new_step_forgets_the_last_one() -> None:
    hand = HandClock()
    clock = hand.clock()
    clock.begin()
    hand.pass_s(1.0)
    clock.mark()

    clock.begin()

    assert clock.latency_s() == ()
    assert clock.elapsed_s() == 0.0


def run_on_device(run_ahead: int, num: int = 4) -> tuple[list[float], list[float]]:
    """Queue micro-batches of 50 ms; what was elapsed, and the host's time, before each.

    The host needs no time to queue them.
    """
    device = FakeDevice()
    host = device.host
    clock = EventClock(device.make_event, sleep=host.pass_s, max_run_ahead=run_ahead)
    begun_s = host.now_s
    elapsed, host_s = [], []
    clock.begin()
    for _ in range(num):
        elapsed.append(round(clock.elapsed_s(), 6))
        host_s.append(host.now_s - begun_s)
        device.queue(0.05)
        clock.mark()
    assert clock.latency_s() == pytest.approx((0.05,) * num)
    return elapsed, host_s


def test_the_host_is_one_micro_batch_ahead_of_the_device() -> None:
    elapsed, host_s = run_on_device(run_ahead=1)

    # One that is under way counts as long as the last finished one.
    assert elapsed == [0.0, 0.0, 0.1, 0.15]
    # Polled every 50 us.
    assert host_s == pytest.approx([0.0, 0.0, 0.05, 0.1], abs=2e-4)


def test_without_running_ahead_the_device_idles_between_two() -> None:
    elapsed, host_s = run_on_device(run_ahead=0)

    assert elapsed == pytest.approx([0.0, 0.05, 0.1, 0.15], abs=2e-4)
    assert host_s == pytest.approx([0.0, 0.05, 0.1, 0.15], abs=4e-4)


def test_work_queued_before_the_step_is_not_of_the_step() -> None:
    device = FakeDevice()
    device.queue(3.0)
    clock = EventClock(device.make_event, sleep=device.host.pass_s)

    clock.begin()
    device.queue(0.25)
    clock.mark()

    assert clock.latency_s() == pytest.approx((0.25,))


def test_a_model_on_the_cpu_is_timed_by_the_host() -> None:
    assert isinstance(make_clock(torch.device("cpu")), CpuClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_s06_a_gpu_is_timed_by_its_events() -> None:
    device = torch.device("cuda", 0)
    clock = make_clock(device)
    clock.begin()
    for _ in range(3):  # each is queued at once and takes tens of milliseconds
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        clock.mark()

    latency_s = clock.latency_s()

    assert max(latency_s) < 1.2 * min(latency_s)
    assert min(latency_s) > 0.01

"""The fake network itself: its clock, its hooks, and that a seed replays a run."""

from typing import Any

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import PeerLostError
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import Gathered, Reduced
from tailbound.protocol.messages import BucketSpec
from tailbound.testing import FakeNet

VECTOR = (BucketSpec("float32", ("w",), ((5000,),)),)


def grads(*values: float) -> list[Any]:
    return [np.full(5000, value, np.float32) for value in values]


def test_nothing_takes_time_on_a_perfect_network() -> None:
    net = FakeNet(3, VECTOR, LossBound())

    net.start()
    values = grads(1.0, 2.0, 3.0)
    net.all_reduce(values, [1.0, 1.0, 1.0])
    net.all_gather([b"a", b"b", b"c"])

    assert values[0].tolist() == [2.0] * 5000
    assert net.now == pytest.approx(0.0)


def test_the_clock_jumps_to_what_is_due_next() -> None:
    """Ways of 10 ms, pings every 20 ms: nothing happens at any other time."""
    slow = Impairments(delay_s=0.01)
    net = FakeNet(1, VECTOR, LossBound(), to_server=slow, to_worker=slow)
    times: set[float] = set()
    net.on_turn = lambda: times.add(round(net.now * 100, 9))

    net.start()

    assert sorted(times) == list(range(len(times)))
    assert 5 <= len(times) <= 9


def test_a_tick_gathers_what_is_due_in_between() -> None:
    jittery = Impairments(jitter_s=0.001)
    net = FakeNet(
        1, VECTOR, LossBound(), to_server=jittery, to_worker=jittery, tick_s=0.0005
    )
    times: list[float] = []
    net.on_turn = lambda: times.append(net.now / 0.0005)

    net.start()
    net.all_reduce(grads(1.0), [1.0])

    assert times == pytest.approx([round(time) for time in times])


def test_a_seed_replays_a_run_and_another_seed_does_not() -> None:
    lossy = Impairments(losses=(IndependentLoss(rate=0.5),), jitter_s=0.01)

    def run(seed: int) -> tuple[float, list[Reduced]]:
        net = FakeNet(
            2, VECTOR, LossBound(), to_server=lossy, to_worker=lossy, seed=seed
        )
        net.start()
        events = net.all_reduce(grads(1.0, 2.0), [1.0, 1.0])
        return net.now, events

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_virtual_seconds_pass_even_if_nothing_happens() -> None:
    net = FakeNet(1, VECTOR, LossBound())
    net.start()

    net.run_for(7.5)

    assert net.now == 7.5


def test_a_job_that_waits_for_nothing_is_an_error_and_no_hang() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()

    with pytest.raises(AssertionError, match="no Gathered on every worker by 0"):
        net.run_until(Gathered)


def test_a_server_that_nobody_says_goodbye_to_does_not_end() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    net.workers.pop()

    with pytest.raises(AssertionError, match="the server did not end"):
        net.close()


def test_a_job_that_failed_does_not_end_well() -> None:
    net = FakeNet(2, VECTOR, LossBound())
    net.start()
    net.kill(1)

    with pytest.raises(PeerLostError, match="rank 1"):
        net.close()


def test_a_machine_whose_timer_is_due_for_nothing_is_found() -> None:
    """A real driver would spin at full CPU there."""

    class Spinning:
        def __init__(self, net: FakeNet) -> None:
            self.net = net

        def timer(self) -> float:
            return self.net.now

        def handle_timer(self, now: float) -> None:
            pass

    net = FakeNet(1, VECTOR, LossBound())
    net.start()
    spinning = Spinning(net)
    net.server.timer = spinning.timer  # type: ignore[method-assign]
    net.server.handle_timer = spinning.handle_timer  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match="with nothing to do"):
        net.run_until(Reduced)


def test_a_cut_takes_the_datagrams_of_one_direction_until_it_is_mended() -> None:
    net = FakeNet(2, VECTOR, LossBound.fixed(0.0))
    net.start()
    net.cut_udp(to_ranks=(0,))
    values = grads(1.0, 3.0)
    net.begin(values, [1.0, 1.0])

    (event,) = net.run_until(Reduced, (1,))
    assert values[1].tolist() == [2.0] * 5000
    assert values[0].tolist() == [1.0] * 5000
    net.mend_udp()
    net.run_until(Reduced, (0,))

    assert values[0].tolist() == [2.0] * 5000
    assert event.reports[0].retransmitted == 0

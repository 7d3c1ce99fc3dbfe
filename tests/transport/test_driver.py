"""The one thread: calls, its end, and what a bug of ours in it looks like outside."""

import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jobs import QUICK, driven, leaves_nothing, reduced, run_job, vector
from tailbound.config import LossBound
from tailbound.errors import TailboundError
from tailbound.protocol.events import Failed
from tailbound.transport.driver import Driver
from tailbound.transport.group import Group, Server

pytestmark = pytest.mark.sockets


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with leaves_nothing():
        yield


def wait_for(done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_calls_run_in_the_drivers_thread_in_order() -> None:
    driver = Driver()
    driver.start()
    seen: list[tuple[int, str]] = []

    for number in range(5):
        driver.call(
            lambda number=number: seen.append(  # type: ignore[misc]
                (number, threading.current_thread().name)
            )
        )
    wait_for(lambda: len(seen) == 5)
    driver.stop(5.0)

    assert seen == [(number, "tailbound-driver") for number in range(5)]


def test_a_driver_can_be_stopped_twice_and_before_it_starts() -> None:
    never = Driver()
    never.stop(1.0)
    never.close()
    driver = Driver()
    driver.start()

    before = driver.is_running
    driver.stop(5.0)
    driver.stop(5.0)

    assert (before, driver.is_running) == (True, False)
    driver.call(lambda: None)  # nobody is there: nothing happens


def test_a_driver_that_is_stuck_closes_everything_when_it_ends() -> None:
    driver = Driver()
    driver.start()
    started, go_on = threading.Event(), threading.Event()

    def stuck() -> None:
        started.set()
        go_on.wait(20.0)

    driver.call(stuck)
    assert started.wait(20.0)
    (thread,) = [t for t in threading.enumerate() if t.name == "tailbound-driver"]
    driver.stop(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join(20.0)

    assert not thread.is_alive()


def test_a_bug_in_the_thread_reaches_every_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(1, transport=QUICK)
    with driven(server) as driver:
        group = Group(
            server.address,
            rank=0,
            world_size=1,
            buckets=vector(100),
            bound=LossBound.fixed(0.0),
            transport=QUICK,
        )

        def bug() -> None:
            raise KeyError("a bug of ours")

        with caplog.at_level(logging.CRITICAL, logger="tailbound"):
            driver.call(bug)
            wait_for(lambda: not driver.is_running)
        with pytest.raises(TailboundError, match="lost the server"):
            reduced(group, 100, 1.0)
        group.close()

    with pytest.raises(TailboundError, match=r"failed: KeyError.*a bug of ours"):
        server.wait_ended(1.0)


def test_a_call_after_the_thread_died_raises_why_it_died() -> None:
    server = Server(1, transport=QUICK)
    group = Group(
        server.address,
        rank=0,
        world_size=1,
        buckets=vector(100),
        bound=LossBound.fixed(0.0),
        transport=QUICK,
        server=server,
    )
    # Not a ValueError, which is the caller's: the conversion fails in the thread.
    broken: Any = "no array"
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(TailboundError, match="transport thread failed"):
            group.all_reduce(broken, 1.0)
        with pytest.raises(TailboundError, match="transport thread failed"):
            reduced(group, 100, 1.0)
    finally:
        logging.disable(logging.NOTSET)
    group.close()


def test_a_bug_in_the_callers_own_thread_is_raised_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(1, transport=QUICK)
    driver = Driver()
    driver.add(server.station)

    def bug() -> None:
        raise KeyError("a bug of ours")

    driver.call(bug)
    with (
        caplog.at_level(logging.CRITICAL, logger="tailbound"),
        pytest.raises(KeyError, match="a bug of ours"),
    ):
        driver.run()


def test_a_job_over_file_descriptors_above_1024_works() -> None:
    """``select`` ends at 1024; the driver then waits with epoll alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1400:
        pytest.skip("this machine does not allow 1400 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    with socket.socket() as spare:
        copies = [os.dup(spare.fileno()) for _ in range(1100)]
        try:
            job = run_job(
                [lambda group: reduced(group, 5000, group.rank).sum()] * 2,
                buckets=vector(5000),
            )
        finally:
            for copy in copies:
                os.close(copy)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert job.check() == [2500.0, 2500.0]


def test_an_idle_job_sleeps() -> None:
    """Half a second of waiting costs less than half of it in CPU time."""
    server = Server(1, transport=QUICK)
    with driven(server):
        group = Group(
            server.address,
            rank=0,
            world_size=1,
            buckets=vector(100),
            bound=LossBound.fixed(0.0),
            transport=QUICK,
        )
        reduced(group, 100, 1.0)
        before_s = time.process_time()
        time.sleep(0.5)
        idle_s = time.process_time() - before_s
        group.close()

    assert idle_s < 0.25


def test_a_job_that_failed_sleeps_until_it_is_closed() -> None:
    """No timer stays due after a failure."""
    server = Server(2, transport=QUICK, join_timeout_s=0.05)
    with driven(server):
        wait_for(lambda: server.endpoint.has_failed)
        before_s = time.process_time()
        time.sleep(0.5)
        idle_s = time.process_time() - before_s

    assert idle_s < 0.25
    assert isinstance(server.endpoint.error, TailboundError)
    with pytest.raises(TailboundError, match="rank 0, rank 1"):
        server.wait_ended(1.0)


def test_inf_and_nan_in_a_gradient_warn_nobody() -> None:
    values = np.array([1.0, np.inf, -np.inf, np.nan] * 500, np.float32)

    def work(group: Group) -> Any:
        mean = values.copy()
        group.all_reduce(mean, 1.0)
        return mean.tobytes()

    job = run_job([work] * 2, buckets=vector(2000))

    first, second = job.check()
    assert first == second
    assert np.isfinite(np.frombuffer(first, np.float32)).sum() == 500
    assert not any(isinstance(error, Failed) for error in job.errors)

"""One process of the demo: what it does with its orders, and how it ends."""

import io
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import msgspec
import pytest

from tailbound.config import ComputeBound, LossBound, Transport
from tailbound.lab.demo_process import follow
from tailbound.lab.orders import (
    Answer,
    Broken,
    Conditions,
    Done,
    Ready,
    ServerOrder,
    WorkerOrder,
)
from tailbound.protocol.messages import BucketSpec
from tailbound.records import EpochReport, StepReport, ThresholdReport
from tailbound.report.outcome import Stragglers
from tailbound.transport.group import Group

GOOD = Conditions(rtt_ms=0, loss=0, burst=0, burst_rounds=(), mtu=1500, seed=3)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def lines(*orders: msgspec.Struct) -> io.BytesIO:
    return io.BytesIO(b"".join(msgspec.json.encode(order) + b"\n" for order in orders))


def training(task: str = "digits") -> WorkerOrder:
    return WorkerOrder(
        run="fixed",
        server="127.0.0.1:7000",
        task=task,
        data=None,
        epochs=1,
        batch_size=128,
        bound=LossBound(),
        timeout_s=5.0,
        conditions=GOOD,
    )


@dataclass
class Heard:
    """What a process said, and its server's address once it is said."""

    answers: list[Answer] = field(default_factory=list)
    has_address: threading.Event = field(default_factory=threading.Event)

    def __call__(self, answer: Answer) -> None:
        self.answers.append(answer)
        if isinstance(answer, Ready):
            self.has_address.set()


@pytest.mark.slow
def test_a_worker_trains_and_tells_steps_and_epochs() -> None:
    """A job of one, so that it needs no server: 1437 samples are 11 batches of 128."""
    heard = Heard()

    assert follow(lines(training()), "worker", heard) == 0

    steps = [one for one in heard.answers if isinstance(one, StepReport)]
    assert [step.step for step in steps] == list(range(1, 12))
    assert {step.run for step in steps} == {"fixed"}
    (epoch,) = (one for one in heard.answers if isinstance(one, EpochReport))
    assert (epoch.epoch, epoch.step, epoch.metric_name) == (1, 11, "accuracy")
    assert 0.0 < epoch.metric <= 1.0
    assert epoch.train_s > 0.0
    assert len(epoch.digest) == 16
    assert (heard.answers[0], heard.answers[-1]) == (Ready(), Done())


@pytest.mark.slow
def test_a_slow_worker_waits_in_its_micro_batches_and_is_cut_by_its_bound() -> None:
    """Twelve micro-batches of 4 ms or more do not fit into 20 ms."""
    heard = Heard()
    order = msgspec.structs.replace(
        training(),
        run="compute",
        compute=ComputeBound(threshold_s=0.02, preempt="backward"),
        stragglers=Stragglers(
            micro_batches=12, micro_batch_s=0.004, max_drop=0.1, preempt="backward"
        ),
    )

    assert follow(lines(order), "worker", heard) == 0

    steps = [one for one in heard.answers if isinstance(one, StepReport)]
    assert {step.planned for step in steps} == {12}
    assert all(step.overshoot_s is not None for step in steps)
    assert 0.0 < max(step.computed for step in steps) < 6.0
    for step in steps:
        # The first begins to wait a moment before its time is taken.
        assert sum(step.latency_s) >= 0.0039 * len(step.latency_s)
    (last,) = (one for one in heard.answers if isinstance(one, ThresholdReport))
    assert (last.run, last.step, last.threshold_s) == ("compute", 11, 0.02)


def test_what_a_worker_cannot_do_is_told_in_one_line() -> None:
    heard = Heard()

    assert follow(lines(training("digit"), training()), "worker", heard) == 1

    (_, broken) = heard.answers
    assert isinstance(broken, Broken)
    assert broken.message.startswith("task is one of digits, mnist1d")


@pytest.mark.sockets
def test_a_server_tells_its_address_and_when_all_have_left() -> None:
    heard = Heard()
    order = ServerOrder(run="fixed", world_size=1, timeout_s=5.0, conditions=GOOD)
    serving = threading.Thread(
        target=follow, args=(lines(order), "server", heard), daemon=True
    )
    serving.start()
    assert heard.has_address.wait(5.0)
    (ready,) = heard.answers
    assert isinstance(ready, Ready)

    group = Group(
        ready.address,
        rank=0,
        world_size=1,
        buckets=(BucketSpec("float32", ("w",), ((8,),)),),
        bound=LossBound(),
        transport=Transport(mtu=1500, timeout_s=5.0),
    )
    group.close()
    serving.join(5.0)

    assert heard.answers[1:] == [Done()]


@pytest.mark.slow
@pytest.mark.sockets
def test_a_server_waits_two_timeouts_for_its_workers() -> None:
    heard = Heard()
    order = ServerOrder(run="fixed", world_size=2, timeout_s=0.2, conditions=GOOD)

    assert follow(lines(order), "server", heard) == 1

    _, broken = heard.answers
    assert isinstance(broken, Broken)
    assert broken.message.startswith("lost rank 0, rank 1 during start-up")


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_is_left_to_the_launcher_whose_end_is_its_end() -> None:
    """An order that makes it say something shows that it listens already."""
    order = ServerOrder(run="fixed", world_size=1, timeout_s=20.0, conditions=GOOD)
    server = start("-m", "tailbound.lab.demo_process", "server")
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(msgspec.json.encode(order).decode() + "\n")
    server.stdin.flush()
    assert server.stdout.readline().startswith('{"kind":"ready"')

    server.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.3)
    server.terminate()
    server.communicate(timeout=10.0)

    assert server.returncode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.processes
def test_without_orders_it_ends_in_good_order() -> None:
    server = start("-m", "tailbound.lab.demo_process", "server")

    out, errors = server.communicate("", timeout=30.0)

    assert (server.returncode, out, errors) == (0, "", "")


@pytest.mark.slow
@pytest.mark.processes
def test_a_role_that_is_none_is_refused() -> None:
    process = start("-m", "tailbound.lab.demo_process", "both")

    _, errors = process.communicate(timeout=30.0)

    assert process.returncode == 1
    assert errors.startswith("usage: ")

"""FIELD.md's cases of the job: S02 (its runs without a compute bound), A06, A12, A13.

S02's third run is here too: what a rank-local NaN does must be the same everywhere.
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tailbound
from tailbound.config import LossBound, Transport
from tailbound.errors import RemoteError
from tailbound.protocol.events import Ended
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.wire import HEADER_BYTES
from tailbound.testing import FakeNet
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.transport.group import Group, Server
from training.ranks import (
    TIMEOUT_S,
    Vector,
    finish,
    open_sockets,
    plain_sgd,
    run_ranks,
    start_ranks,
)

pytestmark = pytest.mark.sockets


def one_step(rank: int, make_exchange: MakeExchange, inputs: list[float]) -> list[Any]:
    """M=4: one step with these inputs; weight, gradient's norm and what was told."""
    model = Vector()
    with attach_through(make_exchange, model, plain_sgd(model), micro_batches=4) as job:
        for x in inputs:
            job.backward(model(torch.tensor([[x]])))
        report = job.step()
    return [model.w.item(), report.step, report.total_weight, report.skipped]


def test_s02_a_rank_with_nothing_counts_with_weight_0() -> None:
    outcomes = run_ranks(
        lambda rank, make: one_step(rank, make, [[1.0, 2.0, 3.0, 6.0], []][rank])
    )

    assert outcomes == 2 * [[-3.0, 1, 4.0, False]]  # not -1.5


def test_s02_a_step_where_nobody_has_anything_is_skipped_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        outcomes = run_ranks(lambda rank, make: one_step(rank, make, []))

    assert outcomes == 2 * [[0.0, 1, 0.0, True]]
    assert [record.message[:15] for record in caplog.records] == ["step 1 skipped:"]


def test_s02_a_nan_on_one_rank_has_the_same_effect_on_both() -> None:
    outcomes = run_ranks(
        lambda rank, make: one_step(rank, make, [[1.0], [math.nan]][rank])
    )

    assert [math.isnan(outcome[0]) for outcome in outcomes] == [True, True]
    assert outcomes[0][1:] == outcomes[1][1:] == [1, 2.0, False]


def test_a06_an_error_in_the_loop_ends_every_rank_within_5_s() -> None:
    raised_s = []

    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = Vector()
        with attach_through(make_exchange, model, plain_sgd(model)) as job:
            for step in range(100):
                job.backward(model(torch.tensor([[1.0]])))
                if rank == 0 and step == 3:
                    raised_s.append(time.monotonic())
                    raise LookupError("no such sample: 17")
                job.step()

    first, second = run_ranks(work)

    assert time.monotonic() - raised_s[0] < 5.0
    assert isinstance(first, LookupError)
    assert isinstance(second, RemoteError)
    assert str(second) == "rank 0 ended the job: LookupError: no such sample: 17"
    names = [thread.name for thread in threading.enumerate()]
    assert "tailbound-driver" not in names


@pytest.mark.slow
@pytest.mark.processes
def test_a06_the_failing_process_shows_its_own_error_and_the_other_its_name() -> None:
    kept = set(os.listdir("/dev/shm"))

    first, second = finish(start_ranks("failing"))
    ended_s = time.time()

    (code, raised_s, errors), (other_code, _, other_errors) = first, second
    assert code == 1
    assert ended_s - float(raised_s) < 5.0
    assert errors.splitlines()[-1] == "LookupError: no such sample: 17"
    assert other_code == 1
    assert other_errors.splitlines()[-1] == (
        "tailbound.errors.RemoteError: rank 0 ended the job: LookupError: no such "
        "sample: 17"
    )
    assert set(os.listdir("/dev/shm")) <= kept


def test_a12_a_job_of_one_rank_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = Vector()
    before = open_sockets()
    begun = threading.active_count()

    with tailbound.attach(model, plain_sgd(model)) as job:
        job.backward(model(torch.tensor([[2.0]])))
        job.step()
        after = open_sockets()

    assert after == before
    assert threading.active_count() == begun
    assert model.w.item() == -2.0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def agreed_bytes(host: str, *mtus: int) -> list[int]:
    """UDP payload, our header included, that each rank of a job ended up with."""
    server = Server(
        len(mtus), host=host, transport=Transport(mtu=9000, timeout_s=TIMEOUT_S)
    )
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    groups: dict[int, Group] = {}

    def join(rank: int, mtu: int) -> None:
        groups[rank] = Group(
            server.address,
            rank=rank,
            world_size=len(mtus),
            buckets=(BucketSpec("float32", ("w",), ((8,),)),),
            bound=LossBound(),
            transport=Transport(mtu=mtu, timeout_s=TIMEOUT_S),
        )

    in_threads([partial(join, rank, mtu) for rank, mtu in enumerate(mtus)])
    sizes = [groups[rank].payload_bytes + HEADER_BYTES for rank in range(len(mtus))]
    in_threads([group.close for group in groups.values()])
    serving.join(TIMEOUT_S)
    return sizes


def in_threads(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)


@pytest.mark.parametrize(
    ("mtus", "largest"), [((1500,), 1472), ((9000,), 8972), ((1500, 9000), 1472)]
)
def test_a13_a_datagram_with_our_header_fits_the_smallest_mtu(
    mtus: tuple[int, ...], largest: int
) -> None:
    for size in agreed_bytes("127.0.0.1", *mtus):
        assert largest - 8 < size <= largest


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on loopback")
def test_a13_ipv6_leaves_20_bytes_less() -> None:
    (size,) = agreed_bytes("::1", 1500)

    assert 1452 - 8 < size <= 1452


def test_a06_a_server_that_goes_after_our_goodbye_is_no_loss() -> None:
    """Its process may end before its answer is here; waiting for it would hang."""
    net = FakeNet(2, (BucketSpec("float32", ("w",), ((8,),)),), LossBound())
    net.start()
    worker = net.workers[0]

    worker.close()
    worker.lose_link(0, "its connection closed", net.now)

    assert worker.next_event() == Ended()
    assert worker.error is None

"""What a process says, in both plans, when a deadline gave up more than the bound."""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jobs import LIMIT_S, leaves_nothing, run_job, vector
from tailbound.config import LossBound, Transport
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.transport.group import Group
from tailbound.transport.member import warn_given_up
from tailbound.transport.mesh import Meeting, MeshGroup

pytestmark = pytest.mark.sockets

NUM = 100_000
"""277 chunks: 28 arrive in each pass under 90 % loss."""
BOUND = LossBound(p_low=0.0, p_high=0.0, deadline_s=0.03)
CLEAN = Transport(mtu=1500, timeout_s=20.0)
LOSSY = Transport(
    mtu=1500,
    timeout_s=20.0,
    impairments=Impairments(losses=(IndependentLoss(rate=0.9),), delay_s=0.002),
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    warn_given_up.cache_clear()
    with leaves_nothing():
        yield
    warn_given_up.cache_clear()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "closed at its deadline" in text]


def test_a_worker_warns_once_for_all_rounds(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Group) -> list[int]:
        told = []
        for _ in range(2):
            done = group.all_reduce(np.ones(NUM, np.float32), 1.0)
            told.append(done.reports[0].given_up)
        return told

    with caplog.at_level(logging.WARNING, "tailbound"):
        job = run_job(
            [work],
            buckets=vector(NUM),
            bound=BOUND,
            transport=CLEAN,
            server_transport=LOSSY,
        )

    assert [0 < given_up < 277 for given_up in job.check()[0]] == [True, True]
    assert len(warned(caplog)) == 1


def test_so_does_a_rank_of_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    addresses = ["", ""]
    all_here = threading.Barrier(2, timeout=LIMIT_S)
    given_up: list[list[int]] = [[], []]

    def work(rank: int) -> None:
        """Rank 0 loses what it receives, so rank 1's gradient is cut."""

        def meet(address: str) -> Meeting:
            addresses[rank] = address
            all_here.wait()
            return Meeting(5, (addresses[0], addresses[1]))

        transport = CLEAN if rank else LOSSY
        mesh = MeshGroup(rank, 2, BOUND, transport, host="127.0.0.1", meet=meet)
        try:
            for _ in range(2):
                done = mesh.all_reduce(np.ones(NUM, np.float32), 1.0)
                given_up[rank].append(done.reports[0].given_up)
        finally:
            mesh.close()

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)
    ]
    with caplog.at_level(logging.WARNING, "tailbound"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    assert given_up[0] == [0, 0]
    assert [0 < chunks < 139 for chunks in given_up[1]] == [True, True]
    assert len(warned(caplog)) == 1

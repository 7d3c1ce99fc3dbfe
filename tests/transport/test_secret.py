"""Jobs with a secret, over real sockets: who knows it, who does not."""

import logging
import socket
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jobs import QUICK, Work, driven, reduced, run_job, vector
from tailbound.config import Transport
from tailbound.errors import HandshakeError, PeerLostError
from tailbound.security.gate import MAGICS
from tailbound.transport.group import Server
from tailbound.transport.mesh import MeshGroup
from transport.test_mesh import run_mesh

pytestmark = pytest.mark.sockets

OPEN = replace(QUICK, timeout_s=3.0)
SECRET = replace(OPEN, secret="correct horse battery")
OTHER = replace(OPEN, secret="another horse battery")
UNPROVED = "it did not prove that it knows this job's secret: set the same"


def mean(mesh: MeshGroup) -> float:
    values = np.full(5000, 1.0 + mesh.rank, np.float32)
    mesh.all_reduce(values, 1.0)
    return float(values[0])


def test_ranks_that_know_the_secret_reduce() -> None:
    assert run_mesh(mean, 3, transport=SECRET) == [2.0] * 3


def test_so_do_workers_of_a_server_that_knows_it() -> None:
    works: list[Work] = [
        partial(reduced, num=100, value=1.0),
        partial(reduced, num=100, value=3.0),
    ]

    job = run_job(works, buckets=vector(100), transport=SECRET)

    assert [values[0] for values in job.check()] == [2.0, 2.0]


@pytest.mark.parametrize("stranger", [OPEN, OTHER])
def test_a_rank_with_another_secret_or_none_gets_nowhere(
    stranger: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 connects; rank 0 goes on waiting for who belongs to it."""
    caplog.set_level(logging.WARNING, "tailbound")

    first, second = run_mesh(mean, 2, transport=[SECRET, stranger])

    assert isinstance(first, PeerLostError)
    assert "lost rank 1 during start-up (did not join before the deadline)" in str(
        first
    )
    assert UNPROVED in caplog.text
    if stranger is OPEN:
        assert isinstance(second, HandshakeError)
        assert second.field == "secret"
        assert str(second) == (
            "secret differs: none, or another one here, one that must be proved there; "
            "set the same TAILBOUND_SECRET on every rank"
        )
    else:
        assert isinstance(second, PeerLostError)
        assert UNPROVED in str(second)


def test_a_rank_without_a_secret_gives_none_to_who_asks() -> None:
    """Rank 1 has one: to rank 0 its greeting is a stranger's nonsense."""
    first, second = run_mesh(mean, 2, transport=[OPEN, SECRET])

    assert isinstance(first, PeerLostError)
    assert isinstance(second, PeerLostError)
    assert "rank 0" in str(second)
    assert UNPROVED in str(second)


def test_a_wrong_proof_is_answered_with_a_reason_and_without_the_secret() -> None:
    server = Server(1, transport=SECRET)
    with driven(server):
        host, port = server.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
            stranger.sendall(MAGICS["session"] + bytes(64))
            words = b""
            while data := stranger.recv(4096):
                words += data

    assert words.startswith(MAGICS["session"])
    assert b"TAILBOUND_SECRET" in words
    assert b"horse" not in words


def test_a_secret_is_in_no_text_of_the_settings() -> None:
    assert "horse" not in repr(SECRET)

"""Faults that strike a running job of three hosts: it goes on, or all ranks end.

They end within the deadline (8 s without a peer, 3 s without UDP), each with one line
that names who failed. ``make test-faults`` prints what each fault led to.
"""

import re
import signal
import time

import pytest

from faults.conftest import Note
from faults.crew import Crew
from namespaces import needs_namespaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.netns,
    pytest.mark.timeout(120),
    needs_namespaces,
]

DEADLINE_S = 14.0
"""The longest wait for a peer, 8 s, and what ending takes on a busy machine."""


def check_all_named(crew: Crew, ranks: tuple[int, ...], pattern: str) -> str:
    """These ranks ended with one line each that matches; the first of them."""
    for rank in ranks:
        one = crew.ranks[rank]
        assert one.process.returncode == 1, (rank, one.error)
        assert "\n" not in one.error
        assert re.search(pattern, one.error), one.error
    return crew.ranks[ranks[0]].error


def check_went_on(crew: Crew) -> None:
    """All ranks came to the end, with equal parameters."""
    digests = {one.digest for one in crew.ranks}
    assert len(digests) == 1
    assert {one.error for one in crew.ranks} == {""}


# -- processes ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_is_named_by_all_others(
    crew: Crew, note: Note, victim: int
) -> None:
    """Rank 0 had the store, which nobody needs any more."""
    crew.start()
    crew.await_step(5)

    crew.strike()
    crew.signal(victim, signal.SIGKILL)
    seconds = crew.wait()

    others = tuple(rank for rank in range(3) if rank != victim)
    error = check_all_named(crew, others, f"PeerLostError: .*rank {victim}")
    note(f"kill -9 of rank {victim}", error, seconds)
    assert seconds < DEADLINE_S


def test_a_rank_that_is_stopped_for_five_seconds_is_waited_for(
    crew: Crew, note: Note
) -> None:
    crew.start(steps=60)
    crew.await_step(5)

    crew.strike()
    crew.signal(2, signal.SIGSTOP)
    time.sleep(5.0)
    crew.signal(2, signal.SIGCONT)
    seconds = crew.wait()

    check_went_on(crew)
    note("SIGSTOP of rank 2 for 5 s", "goes on, replicas equal", seconds)


def test_a_rank_that_is_stopped_for_ever_is_named(crew: Crew, note: Note) -> None:
    crew.start()
    crew.await_step(5)

    crew.strike()
    crew.signal(2, signal.SIGSTOP)
    seconds = crew.wait(0, 1)

    error = check_all_named(crew, (0, 1), "rank 2")
    note("SIGSTOP of rank 2 for ever", error, seconds)
    assert seconds < DEADLINE_S


# -- user code ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "own", "fault"),
    [
        ("label", "ValueError: a label is out of range", "an exception in user code"),
        (
            "memory",
            "OutOfMemoryError: tried to allocate 2.00 GiB",
            "out of memory in a micro-batch",
        ),
    ],
)
def test_an_error_in_one_ranks_own_code_reaches_all(
    crew: Crew, note: Note, how: str, own: str, fault: str
) -> None:
    crew.start(changes={1: {"fail_at": 7, "fail_how": how}})
    crew.await_step(6)
    crew.strike()

    seconds = crew.wait()

    assert crew.ranks[1].error == own
    error = check_all_named(crew, (0, 2), f"RemoteError: .*rank 1.*{own[-10:]}")
    note(f"{fault}, on rank 1", error, seconds)
    assert seconds < DEADLINE_S


def test_a_full_disk_for_records_ends_the_job_with_its_name(
    crew: Crew, note: Note
) -> None:
    """Each host has a file system of its own, of 32 KB, for rank 1's records."""
    crew.start(
        wrap={1: "mount -t tmpfs -o size=32k tmpfs /mnt"},
        changes={1: {"records": "/mnt/records.jsonl"}},
    )
    crew.await_step(1)
    crew.strike()

    seconds = crew.wait()

    assert "No space left on device" in crew.ranks[1].error
    error = check_all_named(crew, (0, 2), r"rank 1.*No space left on device")
    note("full disk for rank 1's records", error, seconds)


# -- the network ----------------------------------------------------------------------


def test_a_reset_control_connection_ends_the_job(crew: Crew, note: Note) -> None:
    crew.start()
    crew.await_step(5)

    crew.strike()
    peer = crew.hosts.address(2)
    crew.nft(1, f"ip saddr {peer} meta l4proto tcp reject with tcp reset")
    seconds = crew.wait()

    check_all_named(crew, (1,), "rank [02]")
    error = check_all_named(crew, (0, 2), "rank [12]")
    note("control connection of ranks 1 and 2 reset", error, seconds)
    assert seconds < DEADLINE_S


@pytest.mark.parametrize(
    ("ranks", "ways"), [((1,), "one way"), ((0, 1, 2), "every way")]
)
def test_udp_that_is_cut_for_a_second_is_caught_up(
    crew: Crew, note: Note, ranks: tuple[int, ...], ways: str
) -> None:
    crew.start(steps=40)
    crew.await_step(5)

    crew.strike()
    for rank in ranks:
        crew.nft(rank, "meta l4proto udp drop")
    time.sleep(1.0)
    for rank in ranks:
        crew.mend(rank)
    seconds = crew.wait()

    check_went_on(crew)
    note(f"UDP cut {ways} for 1 s", "goes on, replicas equal", seconds)


@pytest.mark.parametrize(
    ("ranks", "ways"), [((1,), "towards rank 1"), ((0, 1, 2), "every way")]
)
def test_udp_that_is_cut_for_ever_is_named(
    crew: Crew, note: Note, ranks: tuple[int, ...], ways: str
) -> None:
    crew.start()
    crew.await_step(5)

    crew.strike()
    for rank in ranks:
        crew.nft(rank, "meta l4proto udp drop")
    seconds = crew.wait()

    error = check_all_named(crew, (0, 1, 2), "(?i)udp|rank [012]")
    note(f"UDP cut {ways} for ever", error, seconds)
    assert seconds < DEADLINE_S


def test_a_host_that_loses_its_address_is_named(crew: Crew, note: Note) -> None:
    """It has another one then; nobody knows that."""
    crew.start()
    crew.await_step(5)

    crew.strike()
    crew.ip(1, "addr", "del", f"{crew.hosts.address(1)}/24", "dev", "eth0")
    crew.ip(1, "addr", "add", "10.78.0.77/24", "dev", "eth0")
    seconds = crew.wait()

    error = check_all_named(crew, (0, 2), "rank 1")
    assert crew.ranks[1].process.returncode == 1
    note("another address for rank 1's host", error, seconds)
    assert seconds < DEADLINE_S


def test_a_cable_that_is_pulled_for_two_seconds_is_caught_up(
    crew: Crew, note: Note
) -> None:
    crew.start(steps=40)
    crew.await_step(5)

    crew.strike()
    crew.ip(1, "link", "set", "eth0", "down")
    time.sleep(2.0)
    crew.ip(1, "link", "set", "eth0", "up")
    seconds = crew.wait()

    check_went_on(crew)
    note("rank 1's cable pulled for 2 s", "goes on, replicas equal", seconds)

"""What goes wrong in practice, on whole jobs over loopback (FIELD.md, by id).

The parts of these cases that concern one socket alone are in ``test_udp_cases.py``.
"""

import contextlib
import errno
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import QUICK, Job, driven, free_ports, reduced, run_job, vector
from tailbound.config import LossBound, Transport
from tailbound.errors import (
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    RoundTimeoutError,
    ShapeError,
    TailboundError,
    UnreachableError,
)
from tailbound.impairments import BurstLoss, Impairments, IndependentLoss
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, Reduced, RoundKey
from tailbound.protocol.wire import make_header
from tailbound.testing import FakeNet
from tailbound.transport import links
from tailbound.transport.group import Group, Server
from tailbound.transport.udp import UdpSocket

sockets = pytest.mark.sockets
NUM = 100_000
RANK_PROCESS = Path(__file__).parents[1] / "rank_process.py"


class Device:
    """Stands in for ``sendmsg`` of every socket: records, and fails as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        """Bytes of each call that succeeded, and bytes of its segments."""
        self.failures: list[int] = []
        self.num_tries = 0
        self.fails: Callable[[int, int], int | None] = lambda number, segment: None

    def __call__(self, opened: socket.socket, *args: Any) -> int:
        (part,), ancillary, *_ = args
        segment = int.from_bytes(ancillary[0][2], "little") if ancillary else len(part)
        self.num_tries += 1
        code = self.fails(self.num_tries, segment)
        if code is not None:
            self.failures.append(code)
            raise OSError(code, os.strerror(code))
        self.calls.append((len(part), segment))
        return opened.sendmsg(*args)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    patched = functools.partial(UdpSocket, sendmsg=made)
    monkeypatch.setattr(links, "UdpSocket", patched)
    return made


def exact(num: int, rounds: int = 1) -> Callable[[Group], list[int]]:
    """Work that checks its own means; returns what each round missed."""

    def work(group: Group) -> list[int]:
        missing = []
        for turn in range(rounds):
            values = np.arange(num, dtype=np.float32)
            values *= group.rank + turn
            event = group.all_reduce(values, 1.0)
            middle = (group.world_size - 1) / 2 + turn
            expected = np.arange(num, dtype=np.float32) * np.float32(middle)
            assert np.array_equal(values, expected)
            missing.append(event.reports[0].missing)
        return missing

    return work


# -- S13 batch size -------------------------------------------------------------


@sockets
@pytest.mark.parametrize("mtu", [1428, 576], ids=["payload 1400", "payload 548"])
def test_S13_every_batch_of_a_transfer_is_within_the_kernels_limits(
    device: Device, mtu: int
) -> None:
    job = run_job(
        [exact(1_000_000)],
        buckets=vector(1_000_000),
        transport=Transport(mtu=mtu, timeout_s=20.0),
    )

    assert job.check() == [[0]]
    assert max(num_bytes for num_bytes, _ in device.calls) <= 65507
    assert max(-(-num_bytes // size) for num_bytes, size in device.calls) <= 64
    assert max(size for _, size in device.calls) == mtu - 28


@sockets
def test_S13_a_path_that_takes_less_gets_smaller_segments(device: Device) -> None:
    device.fails = lambda number, segment: errno.EMSGSIZE if segment > 1300 else None

    job = run_job([exact(1_000_000)], buckets=vector(1_000_000))

    assert job.check() == [[0]]
    assert max(size for _, size in device.calls) <= 1300
    assert len(device.failures) <= 3


# -- S15 socket buffers ---------------------------------------------------------


@sockets
@pytest.mark.slow
def test_S15_a_stalled_receiver_loses_nothing() -> None:
    """64 MB at p = 0, while the server's thread stands still for 200 ms."""
    num = 16_000_000
    server = Server(1, transport=QUICK)
    with driven(server) as driver:
        group = Group(
            server.address,
            rank=0,
            world_size=1,
            buckets=vector(num),
            bound=LossBound.fixed(0.0),
            transport=QUICK,
        )
        (conduit,) = server.station.conduits.values()
        window_bytes = conduit.link.window_bytes
        timer = threading.Timer(0.01, driver.call, (lambda: time.sleep(0.2),))
        timer.start()
        values = np.ones(num, np.float32)
        event = group.all_reduce(values, 1.0)
        overflow = conduit.udp.statistics().overflow
        granted = conduit.udp.granted_receive_bytes
        group.close()

    report = event.reports[0]
    assert report.missing == 0
    assert float(values.min()) == float(values.max()) == 1.0
    assert window_bytes <= granted // 2
    # Loopback itself loses nothing: what was sent again had overflowed here.
    assert overflow > 0 or report.retransmitted == 0


@sockets
def test_S15_the_kernels_default_buffers_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """212992 bytes, of which half is data: what is in flight is paced to that."""
    small = functools.partial(UdpSocket, buffer_bytes=106_496)
    monkeypatch.setattr(links, "UdpSocket", small)

    def work(group: Group) -> list[int]:
        assert group.udp_statistics().overflow == 0
        return exact(4_000_000)(group)

    job = run_job([work], buckets=vector(4_000_000))

    assert job.check() == [[0]]
    (conduit,) = job.server.station.conduits.values()
    assert conduit.link.window_bytes == 106_496


# -- S16 UDP blocked ------------------------------------------------------------


def deaf(*, rounds: tuple[int, ...] = (), **settings: Any) -> Transport:
    """A process that receives no datagram, from the start or in these rounds."""
    losses = (BurstLoss(rate=1.0, rounds=rounds),) if rounds else ()
    losses_all = losses or (IndependentLoss(rate=1.0),)
    fields = {"mtu": 1500, "timeout_s": 1.0} | settings
    return Transport(impairments=Impairments(losses=losses_all), **fields)


@sockets
@pytest.mark.slow
@pytest.mark.parametrize("deaf_one", ["server", "worker", "both"])
def test_S16_blocked_udp_is_found_before_training(deaf_one: str) -> None:
    hears = Transport(mtu=1500, timeout_s=1.0)
    started_s = time.monotonic()

    job = run_job(
        [exact(NUM)] * 2,
        buckets=vector(NUM),
        bound=LossBound.fixed(0.99),
        transport=[deaf() if deaf_one != "server" else hears, hears],
        server_transport=deaf() if deaf_one != "worker" else hears,
    )

    assert time.monotonic() - started_s < 10.0
    for error in (*job.errors, job.server_error):
        assert isinstance(error, TailboundError)
        assert "UDP to " in str(error)
        assert "port " in str(error)
        assert "firewall" in str(error)
    # Whoever notices first tells the others.
    assert isinstance(job.server_error, UnreachableError | RemoteError)
    assert "rank " in str(job.server_error)


@sockets
@pytest.mark.slow
def test_S16_udp_that_dies_later_is_found_within_two_rounds() -> None:
    """At p = 0.99, and never a success without any chunk."""
    counts = [0, 0]

    def work(group: Group) -> None:
        for turn in range(1, 10):
            values = np.full(NUM, 1.0, np.float32)
            group.all_reduce(values, 1.0)
            assert float(values.max()) > 0.0
            counts[group.rank] = turn

    job = run_job(
        [work] * 2,
        buckets=vector(NUM),
        bound=LossBound.fixed(0.99),
        transport=Transport(mtu=1500, timeout_s=20.0, silence_s=0.3),
        server_transport=deaf(
            rounds=tuple(range(6, 60)), timeout_s=20.0, silence_s=0.3
        ),
    )

    assert counts == [5, 5]
    for error in job.errors:
        assert isinstance(error, TailboundError)
        assert "no datagram arrived" in str(error)


# -- S17 ports ------------------------------------------------------------------


@contextlib.contextmanager
def taken_base_port() -> Iterator[int]:
    """A port that is taken for TCP and UDP, with some free ones above it."""
    with contextlib.ExitStack() as stack:
        while True:
            tcp = stack.enter_context(socket.socket())
            udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            tcp.bind(("127.0.0.1", 0))
            tcp.listen()
            port = int(tcp.getsockname()[1])
            if port < 60_000:
                with contextlib.suppress(OSError):
                    udp.bind(("127.0.0.1", port))
                    yield port
                    return


@sockets
@pytest.mark.slow
def test_S17_two_jobs_at_once_never_mix_twenty_times() -> None:
    def run(value: float, port: int, found: list[Job]) -> None:
        def work(group: Group) -> float:
            return float(np.unique(reduced(group, 5000, value)).item())

        ports = Transport(mtu=1500, timeout_s=20.0, port_range=(port, port + 40))
        found.append(run_job([work] * 2, buckets=vector(5000), transport=ports))

    with taken_base_port() as port:
        for _ in range(20):
            started_s = time.monotonic()
            jobs: tuple[list[Job], list[Job]] = ([], [])
            threads = [
                threading.Thread(target=run, args=(value, port, found))
                for value, found in zip((1.0, 100.0), jobs, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert time.monotonic() - started_s < 10.0
            assert jobs[0][0].check() == [1.0, 1.0]
            assert jobs[1][0].check() == [100.0, 100.0]


def udp_ports() -> set[int]:
    """Ports of the UDP sockets of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(str(Path(f"/proc/self/fd/{name}").readlink()))
    lines = Path("/proc/net/udp").read_text(encoding="ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return {
        int(field[1].split(":")[1], 16)
        for field in fields
        if f"socket:[{field[9]}]" in inodes
    }


@sockets
def test_S17_all_sockets_lie_inside_the_range_that_was_given() -> None:
    """One listener, two UDP sockets of the server and one of each worker."""
    before = udp_ports()
    first, last = free_ports(4)
    seen: set[int] = set()

    def work(group: Group) -> None:
        reduced(group, 5000, 1.0)
        seen.update(udp_ports() - before)
        reduced(group, 5000, 1.0)

    ports = Transport(mtu=1500, timeout_s=20.0, port_range=(first, last))
    job = run_job([work] * 2, buckets=vector(5000), transport=ports)

    job.check()
    assert seen == set(range(first, last + 1))
    assert first <= int(job.server.address.split(":")[1]) <= last


@sockets
def test_S17_a_range_that_is_too_small_is_a_clear_error() -> None:
    first, last = free_ports(3)
    ports = Transport(mtu=1500, timeout_s=3.0, port_range=(first, last))

    job = run_job([exact(5000)] * 2, buckets=vector(5000), transport=ports)

    text = f"UDP ports {first} to {last} are all in use"
    errors = [error for error in (*job.errors, job.server_error) if error is not None]
    assert any(text in str(error) for error in errors)
    assert all(not isinstance(error, AssertionError) for error in errors)


# -- processes ------------------------------------------------------------------


class Rank:
    """A rank in a process of its own, and what it says."""

    def __init__(self, **plan: Any) -> None:
        # -X faulthandler: a hang that the alarm ends says where it was.
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", RANK_PROCESS, json.dumps(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.strip())

    def wait_for(self, word: str, limit_s: float = 30.0) -> str:
        """The rest of the next line that starts with this word."""
        deadline_s = time.monotonic() + limit_s
        while True:
            line = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            self.lines.append(line)
            if line.split()[0] == word:
                return line[len(word) :].strip()

    def end(self, limit_s: float) -> tuple[int, str]:
        """Exit code, and what was said since; within the limit."""
        code = self.process.wait(limit_s)
        self._reader.join(5.0)
        rest = []
        with contextlib.suppress(queue.Empty):
            while True:
                rest.append(self._queue.get(timeout=0.0))
        return code, "\n".join(rest)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5.0)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[Rank]]]:
    """Start the ranks of a job, the first of which hosts the server."""
    started: list[Rank] = []

    def start(*plans: dict[str, Any]) -> list[Rank]:
        num = len(plans)
        started.append(Rank(rank=0, world_size=num, **plans[0]))
        address = started[0].wait_for("server")
        started.extend(
            Rank(rank=rank, world_size=num, address=address, **plans[rank])
            for rank in range(1, num)
        )
        return started

    yield start
    for rank in started:
        rank.close()


@sockets
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("act", ["exit", "exit-midway"])
def test_S18_survivors_of_a_dead_rank_fail_together_and_name_it(
    ranks: Callable[..., list[Rank]], act: str
) -> None:
    # Longer than what is asserted: nobody waits for a timeout here.
    survivor = {"timeout_s": 20.0, "num": 1_000_000}
    first, second, dying = ranks(survivor, survivor, {**survivor, "act": act})

    assert dying.process.wait(30.0) == 1
    for rank in (first, second):
        code, said = rank.end(5.0)
        assert code == 1
        assert "failed PeerLostError: lost rank 2" in said
        assert said.endswith("threads")  # and no name behind it


@sockets
@pytest.mark.processes
@pytest.mark.slow
def test_S18_a_rank_that_is_slow_is_not_dead(
    ranks: Callable[..., list[Rank]],
) -> None:
    plan = {"timeout_s": 20.0, "rounds": 30, "pause_s": 0.01}
    started = ranks(plan, plan, plan)
    stopped = started[2]
    stopped.wait_for("round")

    stopped.process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    stopped.process.send_signal(signal.SIGCONT)

    for rank in started:
        code, said = rank.end(30.0)
        lines = [*rank.lines, *said.splitlines()]
        rounds = [line for line in lines if line.startswith("round")]
        assert code == 0
        # Ranks give rank + turn: the mean of turn, turn + 1 and turn + 2.
        assert rounds == [f"round {turn} {turn + 1.0}" for turn in range(1, 31)]


@sockets
@pytest.mark.processes
@pytest.mark.slow
def test_A06_an_error_in_the_loop_of_one_rank_ends_all_and_hides_nothing(
    ranks: Callable[..., list[Rank]],
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    port, _ = free_ports(1)
    host, other = ranks({"act": "raise", "port": port}, {})

    host_code, _ = host.end(35.0)
    other_code, said = other.end(5.0)

    assert host.process.stderr is not None
    trace = host.process.stderr.read()
    assert host_code == 1
    assert trace.rstrip().endswith("ValueError: the loss is NaN")
    assert other_code == 1
    assert (
        "failed RemoteError: rank 0 ended the job: ValueError: the loss is NaN" in said
    )
    assert said.endswith("threads")
    assert set(os.listdir("/dev/shm")) <= shared_memory
    Server(2, port=port).close()


def reduce_for_ever(group: Group) -> None:
    while True:
        reduced(group, NUM, 1.0)


@sockets
@pytest.mark.processes
@pytest.mark.slow
def test_A08_a_forked_child_keeps_no_socket_of_ours() -> None:
    """The rank dies, its child lives on: the peer sees it, the port is free."""
    port, _ = free_ports(1)
    host = Rank(rank=0, world_size=2, port=port, rounds=1_000_000, act="fork")
    child = 0
    try:
        address = host.wait_for("server")
        group = Group(
            address,
            rank=1,
            world_size=2,
            buckets=vector(NUM),
            bound=LossBound.fixed(0.0),
            transport=QUICK,
        )
        with contextlib.closing(group):
            child = int(host.wait_for("child"))
            reduced(group, NUM, 1.0)
            host.process.kill()
            killed_s = time.monotonic()
            with pytest.raises(PeerLostError, match="the server"):
                reduce_for_ever(group)
            assert time.monotonic() - killed_s < 2.0
            os.kill(child, 0)  # still there
            host.process.wait()
            Server(2, port=port).close()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        host.close()


# -- S20 reordering and wrap-around ---------------------------------------------


def test_S20_reversed_and_doubled_chunks_around_the_wrap_all_find_their_place() -> None:
    """Rounds 2**32 - 2, 2**32 - 1 and 0, ten chunks each."""
    num = 10 * 362
    net = FakeNet(1, vector(num), LossBound.fixed(0.0), first_counter=2**32 - 2)
    net.start()
    out = memoryview(bytearray(65535))
    saved = b""
    for turn in range(3):
        values = np.arange(num, dtype=np.float32) + turn
        net.begin([values], [1.0])
        datagrams = []
        while net.workers[0].next_datagrams(
            0, out, net.now, max_segments=1, max_bytes=65535
        ):
            datagrams.append(bytes(out[:1472]))
        assert len(datagrams) == 10
        stale = net.server.counters().stale
        if turn == 2:
            net.inject(0, saved)
            assert net.server.counters().stale == stale + 1
        accepted = net.server.counters().accepted
        for datagram in [*reversed(datagrams), datagrams[4]]:
            net.inject(0, datagram)
        saved = datagrams[0]
        (event,) = net.run_until(Reduced)

        assert event.counter == (2**32 - 2 + turn) % 2**32
        assert values.tolist() == [float(index + turn) for index in range(num)]
        assert event.reports[0].retransmitted == 0
        # The duplicate comes after the round closed, or counts once in it.
        assert net.server.counters().accepted - accepted in (10, 11)


def test_S20_a_bucket_with_more_chunks_than_the_header_numbers_is_refused() -> None:
    assert ChunkLayout(2**32, 4, 4).num_chunks == 2**32

    with pytest.raises(ShapeError, match="32-bit sequence number"):
        ChunkLayout(2**32 + 1, 4, 4)


# -- A07 transient send errors --------------------------------------------------


@sockets
def test_A07_a_device_that_is_full_now_and_then_loses_nothing(device: Device) -> None:
    def fails(number: int, segment: int) -> int | None:
        if number % 10 == 0:
            return errno.ENOBUFS
        return errno.EAGAIN if number % 7 == 0 else None

    device.fails = fails
    started_s, cpu_s = time.monotonic(), time.process_time()

    job = run_job([exact(2_000_000)], buckets=vector(2_000_000))

    wall_s = time.monotonic() - started_s
    assert job.check() == [[0]]
    assert {errno.ENOBUFS, errno.EAGAIN} <= set(device.failures)
    assert time.process_time() - cpu_s < 2.0 * wall_s + 0.1


@sockets
@pytest.mark.slow
def test_A07_a_device_that_is_always_full_is_a_named_error_at_the_deadline(
    device: Device,
) -> None:
    """Full once the job has started: the round's deadline ends it, without a spin."""
    limits = Transport(mtu=1500, timeout_s=1.0)

    def work(group: Group) -> None:
        reduced(group, NUM, 1.0)
        device.fails = lambda number, segment: errno.ENOBUFS
        cpu_s, started_s = time.process_time(), time.monotonic()
        try:
            reduced(group, NUM, 1.0)
        finally:
            # A retry each millisecond costs a small part of the time.
            spent_s = time.process_time() - cpu_s
            assert spent_s < 0.75 * (time.monotonic() - started_s)

    job = run_job([work], buckets=vector(NUM), transport=limits)

    (error,) = job.errors
    assert isinstance(error, TailboundError)
    assert "did not finish the gradient of round 2" in str(error)
    assert isinstance(job.server_error, TailboundError)
    assert {type(error), type(job.server_error)} & {RoundTimeoutError}


@sockets
@pytest.mark.slow
def test_A07_a_device_that_is_full_from_the_start_is_blocked_udp(
    device: Device,
) -> None:
    device.fails = lambda number, segment: errno.ENOBUFS
    limits = Transport(mtu=1500, timeout_s=1.0)

    job = run_job([exact(NUM)], buckets=vector(NUM), transport=limits)

    assert "UDP to " in str(job.errors[0])


# -- A10 source address ---------------------------------------------------------


@sockets
def test_A10_every_datagram_comes_from_the_address_that_was_bound() -> None:
    """The server counts any other source as foreign."""
    bound = Transport(mtu=1500, timeout_s=20.0, bind="127.0.0.2")

    job = run_job(
        [exact(NUM, rounds=3)] * 2, buckets=vector(NUM), transport=[bound, QUICK]
    )

    assert job.check() == [[0] * 3] * 2
    counters = job.server.endpoint.counters()
    assert counters.foreign == 0
    assert counters.accepted >= 2 * 3 * 277  # chunks
    assert job.server.endpoint.links[0].address in ("127.0.0.1", "127.0.0.2")
    assert {link.address for link in job.server.endpoint.links.values()} == {
        "127.0.0.1",
        "127.0.0.2",
    }


@sockets
def test_A10_data_of_an_unknown_source_or_session_is_ignored_and_counted() -> None:
    server = Server(1, transport=QUICK)

    def forge(session: int) -> bytes:
        header = make_header(RoundKey(1, 0, Direction.IN), session, 0)
        header["length"] = 1448
        return header.tobytes() + np.full(362, np.nan, np.float32).tobytes()

    def work(group: Group) -> Any:
        (conduit,) = server.station.conduits.values()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.3", 0))
            for session in (server.endpoint.session, 12345):
                other.sendto(forge(session), ("127.0.0.1", conduit.udp.port))
        deadline_s = time.monotonic() + 10.0
        while server.endpoint.counters().foreign < 2 and time.monotonic() < deadline_s:
            time.sleep(0.002)
        return np.unique(reduced(group, NUM, 6.0)).tolist()

    job = run_job([work], buckets=vector(NUM), server=server)

    assert job.check() == [[6.0]]
    assert server.endpoint.counters().foreign == 2


# -- A12 one ahead of the others ------------------------------------------------


def test_A12_a_rank_that_is_one_round_ahead_is_an_error_within_one_round() -> None:
    net = FakeNet(2, vector(1000), LossBound.fixed(0.5), first_counter=[7, 8])
    net.start()
    values: list[Any] = [np.full(1000, value, np.float32) for value in (1.0, 3.0)]

    with pytest.raises(TailboundError, match="rank 1"):
        net.all_reduce(values, [1.0, 1.0])

    assert isinstance(net.server.error, PeerProtocolError)
    assert "round 8, bucket 0" in str(net.server.error)
    assert [set(value.tolist()) for value in values] == [{1.0}, {3.0}]


def test_A12_a_single_worker_gets_its_own_gradient_back() -> None:
    net = FakeNet(1, vector(1000), LossBound.fixed(0.0))
    net.start()
    values = np.arange(1000, dtype=np.float32)

    net.all_reduce([values], [1.0])

    assert values.tolist() == [float(index) for index in range(1000)]

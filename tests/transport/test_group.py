"""The blocking face over real loopback sockets: jobs, their ends and their failures."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jobs import QUICK, driven, leaves_nothing, reduced, run_job, vector
from tailbound.config import LossBound, Transport
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    JobClosedError,
    PeerLostError,
    RemoteError,
    RoundTimeoutError,
    ShapeError,
    TailboundError,
    UnreachableError,
)
from tailbound.impairments import BurstLoss, Impairments, IndependentLoss
from tailbound.protocol.messages import BucketSpec
from tailbound.transport.group import Group, Server

pytestmark = pytest.mark.sockets

NUM = 20_001


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with leaves_nothing():
        yield


def lossy(rate: float, **settings: Any) -> Transport:
    losses = (IndependentLoss(rate=rate),)
    return Transport(
        mtu=1500, timeout_s=20.0, impairments=Impairments(losses=losses, **settings)
    )


@contextlib.contextmanager
def alone(num: int = NUM, **settings: Any) -> Iterator[Group]:
    """A job of one worker whose server turns in the same thread."""
    transport = settings.pop("transport", QUICK)
    server = Server(1, transport=transport)
    group = Group(
        server.address,
        rank=0,
        world_size=1,
        buckets=vector(num),
        bound=LossBound.fixed(0.0),
        transport=transport,
        server=server,
        **settings,
    )
    with contextlib.closing(group):
        yield group


# -- whole jobs -----------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_is_exact_on_every_rank_round_after_round(world_size: int) -> None:
    def work(group: Group) -> list[float]:
        return [
            float(np.unique(reduced(group, NUM, turn + group.rank)).item())
            for turn in range(5)
        ]

    job = run_job([work] * world_size, buckets=vector(NUM))

    middle = (world_size - 1) / 2
    expected = [turn + middle for turn in range(5)]
    assert job.check() == [expected] * world_size


def test_weights_count_and_a_rank_may_have_nothing() -> None:
    def work(group: Group) -> tuple[float, float]:
        weight = (1.0, 0.0, 3.0)[group.rank]
        values = np.full(NUM, 8.0 * weight, np.float32)
        event = group.all_reduce(values, weight)
        return event.total_weight, float(np.unique(values).item())

    job = run_job([work] * 3, buckets=vector(NUM))

    assert job.check() == [(4.0, 8.0)] * 3


def test_buckets_of_every_dtype_take_turns() -> None:
    dtypes = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<u2"}
    buckets = tuple(
        BucketSpec(name, ("w",), ((1000 + turn,),)) for turn, name in enumerate(dtypes)
    )

    def work(group: Group) -> list[str]:
        means = []
        for _ in range(2):
            for turn, (name, wire) in enumerate(dtypes.items()):
                value: Any = (1.5, 2.5)[group.rank]
                if name == "bfloat16":
                    value = (0x3FC0, 0x4020)[group.rank]  # 1.5 and 2.5
                values = np.full(1000 + turn, value, wire)
                group.all_reduce(values, 1.0)
                means.append(np.unique(values).tobytes().hex())
        return means

    job = run_job([work] * 2, buckets=buckets)

    two = ["00000040", "0000000000000040", "0040", "0040"]  # 2.0, little-endian
    assert job.check() == [two * 2] * 2


def test_a_lossy_way_in_is_repaired_to_the_last_chunk() -> None:
    def work(group: Group) -> tuple[bool, int]:
        values = np.arange(NUM, dtype=np.float32) * (group.rank + 1)
        event = group.all_reduce(values, 1.0)
        exact = np.array_equal(values, np.arange(NUM, dtype=np.float32) * 1.5)
        return exact, event.reports[0].missing

    job = run_job(
        [work] * 2,
        buckets=vector(NUM),
        transport=lossy(0.1, seed=1),
        server_transport=lossy(0.5, seed=2),
    )

    assert job.check() == [(True, 0)] * 2


def test_a_bound_lets_chunks_go_and_replicas_stay_identical() -> None:
    """56 chunks, of which 22 may be missing: floor(0.408 * 56)."""

    def work(group: Group) -> tuple[bytes, int, int, float]:
        values = np.full(NUM, 2.0**group.rank, np.float32)
        event = group.all_reduce(values, 1.0)
        way_in = event.reports[0]
        return values.tobytes(), way_in.missing, way_in.num_chunks, event.p

    job = run_job(
        [work] * 3,
        buckets=vector(NUM),
        bound=LossBound.fixed(0.408),
        server_transport=lossy(0.6, delay_s=0.001, seed=4),
    )

    results = job.check()
    assert len({mean for mean, *_ in results}) == 1
    sums = np.unique(np.frombuffer(results[0][0], np.float32) * np.float32(3.0))
    # Subsets of {1, 2, 4}, each rounded when it was divided by 3.
    assert np.abs(sums - np.rint(sums)).max() < 1e-5
    assert 0 <= sums.min() < sums.max() <= 7
    for _, missing, num_chunks, p in results:
        assert (num_chunks, p) == (56, 0.408)
        assert 0 < missing <= 22


def test_delay_shows_in_the_reports_as_round_trips() -> None:
    delay = Transport(
        mtu=1500, timeout_s=20.0, impairments=Impairments(delay_s=0.02, seed=1)
    )

    def work(group: Group) -> Any:
        reduced(group, NUM, 1.0)
        event = group.all_reduce(np.ones(NUM, np.float32), 1.0)
        return event.reports[0]

    job = run_job([work] * 2, buckets=vector(NUM), transport=delay)

    for report in job.check():
        assert report.latency_s >= 0.04
        assert report.waiting_s >= 0.02
        assert report.sends == report.probes == 1


def test_a_burst_in_a_chosen_round_costs_repairs_in_that_round_only() -> None:
    burst = Impairments(losses=(BurstLoss(rate=0.7, rounds=(2,)),), seed=3)

    def work(group: Group) -> list[int]:
        sends = []
        for _ in range(3):
            event = group.all_reduce(np.ones(NUM, np.float32), 1.0)
            sends.append(event.reports[0].sends)
        return sends

    job = run_job(
        [work] * 2,
        buckets=vector(NUM),
        server_transport=Transport(mtu=1500, timeout_s=20.0, impairments=burst),
    )

    for before, hit, after in job.check():
        assert hit >= 5
        assert max(before, after) < hit


def test_all_gather_brings_every_ranks_bytes() -> None:
    large = bytes(range(256)) * 10_000

    def work(group: Group) -> list[Any]:
        first = group.all_gather((b"", large, b"z")[group.rank])
        second = group.all_gather(b"%d" % group.rank)
        return [first, second]

    job = run_job([work] * 3, buckets=vector(NUM))

    assert job.check() == [[(b"", large, b"z"), (b"0", b"1", b"2")]] * 3


def test_a_worker_can_host_the_server_in_its_own_thread() -> None:
    with alone() as group:
        values = reduced(group, NUM, 5.0)
        threads = [t for t in threading.enumerate() if t.name == "tailbound-driver"]

        assert np.unique(values).tolist() == [5.0]
        assert len(threads) == 1


def test_a_host_that_is_done_first_serves_the_others_to_their_end() -> None:
    server = Server(2, transport=QUICK)
    results: dict[int, float] = {}

    def work(rank: int, hosted: Server | None) -> None:
        group = Group(
            server.address,
            rank=rank,
            world_size=2,
            buckets=vector(NUM),
            bound=LossBound.fixed(0.0),
            transport=QUICK,
            server=hosted,
        )
        with contextlib.closing(group):
            mean = reduced(group, NUM, rank)
            if rank == 1:
                time.sleep(0.3)  # the host says goodbye meanwhile
            results[rank] = float(np.unique(mean).item())

    threads = [
        threading.Thread(target=work, args=(0, server)),
        threading.Thread(target=work, args=(1, None)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)

    assert results == {0: 0.5, 1: 0.5}


def test_counters_and_statistics_tell_what_the_socket_saw() -> None:
    def work(group: Group) -> Any:
        reduced(group, NUM, 1.0)
        return group.counters(), group.udp_statistics(), group.payload_bytes

    job = run_job([work] * 2, buckets=vector(NUM))

    for counters, udp, payload_bytes in job.check():
        assert counters.accepted == 56
        assert counters.foreign == counters.malformed == 0
        assert udp.datagrams_sent >= 57  # 56 chunks and a ping
        assert udp.datagrams_received >= 57
        assert payload_bytes == 1448


# -- calls ----------------------------------------------------------------------


def test_an_array_that_is_not_the_bucket_is_refused_and_the_next_works() -> None:
    with alone() as group:
        with pytest.raises(ShapeError):
            group.all_reduce(np.ones(NUM + 1, np.float32), 1.0)
        with pytest.raises(ConfigError, match="weight"):
            group.all_reduce(np.ones(NUM, np.float32), float("nan"))

        assert np.unique(reduced(group, NUM, 3.0)).tolist() == [3.0]


def test_a_closed_group_says_so() -> None:
    with alone() as group:
        group.close()

        with pytest.raises(JobClosedError, match="closed"):
            group.all_reduce(np.ones(NUM, np.float32), 1.0)
        with pytest.raises(JobClosedError):
            group.all_gather(b"")
        group.close()
        group.abort("too late")


class Slow:
    """No array: whoever looks at it waits, and then learns that it is none."""

    @property
    def shape(self) -> tuple[int, ...]:
        time.sleep(0.8)
        raise ValueError("no array at all")


def test_a_call_that_takes_its_time_is_waited_for() -> None:
    values: Any = Slow()

    with alone() as group, pytest.raises(ValueError, match="no array at all"):
        group.all_reduce(values, 1.0)


def test_a_transport_that_stands_still_is_not_waited_for_for_ever() -> None:
    values: Any = Slow()

    with (
        alone(transport=Transport(mtu=1500, timeout_s=0.4)) as group,
        pytest.raises(RoundTimeoutError, match="the transport did not finish a call"),
    ):
        group.all_reduce(values, 1.0)


def test_a_server_whose_workers_do_not_leave_is_waited_for_with_a_limit() -> None:
    server = Server(2)

    with pytest.raises(RoundTimeoutError, match="the other ranks' goodbye"):
        server.wait_ended(0.01)
    server.close()


def test_a_server_needs_a_worker() -> None:
    with pytest.raises(ConfigError, match="1 or more workers, not 0"):
        Server(0)


def test_a_server_that_never_ran_can_be_closed() -> None:
    server = Server(2)

    server.close()
    server.close()


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"TCP port {port} is in use"):
            Server(2, port=port)


# -- failure --------------------------------------------------------------------


def join(address: str, **settings: Any) -> Group:
    fields: dict[str, Any] = {
        "rank": 0,
        "world_size": 2,
        "buckets": vector(NUM),
        "bound": LossBound.fixed(0.0),
        "transport": Transport(mtu=1500, timeout_s=0.3),
    }
    return Group(address, **(fields | settings))


def test_a_refused_connection_is_one_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        with pytest.raises(UnreachableError) as caught:
            join(f"127.0.0.1:{port}")

    assert str(caught.value) == (
        f"TCP to the server at 127.0.0.1:{port} does not get through; "
        "Connection refused; is the server running?"
    )


def test_a_program_of_another_kind_is_not_waited_for_for_ever() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        host, port = other.getsockname()

        with pytest.raises(UnreachableError, match="never started the job"):
            join(f"{host}:{port}")


def test_a_host_whose_own_worker_cannot_join_leaves_nothing_behind() -> None:
    server = Server(2, transport=QUICK)

    with pytest.raises(UnreachableError):
        join("127.0.0.1:1", server=server)


def test_workers_that_do_not_agree_all_hear_why() -> None:
    job = run_job(
        [lambda group: None] * 2,
        buckets=[vector(NUM), vector(NUM + 1)],
    )

    errors = [error for error in job.errors if error is not None]
    assert {type(error) for error in errors} == {HandshakeError, RemoteError}
    for error in (*errors, job.server_error):
        assert f"w [{NUM}]" in str(error)
        assert f"w [{NUM + 1}]" in str(error)


def test_a_start_that_a_rank_is_missing_from_names_it_on_every_rank() -> None:
    server = Server(2, transport=QUICK, join_timeout_s=0.3)
    with driven(server):
        with pytest.raises(PeerLostError) as caught:
            join(server.address, transport=QUICK)
        assert caught.value.peers == ("rank 1",)


def test_an_abort_carries_its_reason_to_the_other_ranks() -> None:
    def fails(group: Group) -> None:
        reduced(group, NUM, 1.0)
        group.abort("ValueError: loss is NaN")

    def goes_on(group: Group) -> None:
        reduced(group, NUM, 1.0)
        reduced(group, NUM, 2.0)

    job = run_job([fails, goes_on], buckets=vector(NUM))

    assert job.errors[0] is None
    assert isinstance(job.errors[1], RemoteError)
    assert str(job.errors[1]) == "rank 0 ended the job: ValueError: loss is NaN"
    assert isinstance(job.server_error, RemoteError)


def test_after_a_failure_every_call_gives_the_same_error() -> None:
    def fails(group: Group) -> None:
        group.abort("first")

    def goes_on(group: Group) -> list[str]:
        messages = []
        for _ in range(2):
            with pytest.raises(TailboundError) as caught:
                reduced(group, NUM, 1.0)
            messages.append(str(caught.value))
        with pytest.raises(TailboundError):
            group.all_gather(b"")
        return messages

    job = run_job([fails, goes_on], buckets=vector(NUM))

    assert job.results[1] == ["rank 0 ended the job: first"] * 2


def test_a_worker_that_leaves_early_is_named() -> None:
    def leaves(group: Group) -> None:
        reduced(group, NUM, 1.0)

    def goes_on(group: Group) -> None:
        reduced(group, NUM, 1.0)
        reduced(group, NUM, 2.0)

    job = run_job([goes_on, leaves], buckets=vector(NUM))

    assert isinstance(job.errors[0], PeerLostError)
    assert job.errors[0].peers == ("rank 1",)


def test_a_goodbye_over_a_slow_link_is_no_failure() -> None:
    """The connection closes before the delayed goodbye is handed on."""
    slow = Transport(mtu=1500, timeout_s=20.0, impairments=Impairments(delay_s=0.05))

    job = run_job(
        [lambda group: reduced(group, NUM, 1.0).sum()] * 2,
        buckets=vector(NUM),
        server_transport=slow,
    )

    assert job.check() == [NUM, NUM]


def test_strangers_do_not_disturb_a_job() -> None:
    server = Server(2, transport=QUICK)
    host, port = server.address.split(":")
    strangers = []

    def knock(text: bytes) -> None:
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(text)
        strangers.append(stranger)

    def work(group: Group) -> float:
        knock(b"")
        mean = reduced(group, NUM, group.rank)
        knock(b"GET / HTTP/1.1\r\n\r\n")
        return float(np.unique(mean).item())

    knock(b"GET / HTTP/1.1\r\n\r\n")
    knock(b"")
    # A reset before the server accepts it: its peer's address is gone already.
    hasty = socket.create_connection((host, int(port)))
    hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    hasty.close()
    job = run_job([work] * 2, buckets=vector(NUM), server=server)
    for stranger in strangers:
        stranger.close()

    assert job.check() == [0.5, 0.5]

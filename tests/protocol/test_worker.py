"""A worker's endpoint: its calls, its reports, and how it fails."""

from typing import Any

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    RoundTimeoutError,
    ShapeError,
    UnreachableError,
)
from tailbound.impairments import Impairments
from tailbound.protocol.events import Ended, Failed, Reduced, Started
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Bitmap,
    BucketSpec,
    Bye,
    Fail,
    GatherPart,
    Hello,
    Mean,
    Message,
    Refuse,
    Start,
    Welcome,
)
from tailbound.protocol.wire import encode_control
from tailbound.protocol.worker import WorkerEndpoint
from tailbound.testing import FakeNet

VECTOR = (BucketSpec("float32", ("w",), ((1000,),)),)


def make_worker() -> WorkerEndpoint:
    worker = WorkerEndpoint(0, 2, VECTOR, LossBound(), timeout_s=60.0, silence_s=5.0)
    worker.connect(Link(-1, "", "10.0.0.1", udp_port=7000), 0.0)
    return worker


def tell(worker: WorkerEndpoint, message: Message) -> None:
    worker.receive_control(0, encode_control(message), 0.0)


def started(**settings: Any) -> FakeNet:
    net = FakeNet(2, VECTOR, LossBound.fixed(0.0), **settings)
    net.start()
    return net


# -- calls ----------------------------------------------------------------------


def test_an_all_reduce_before_the_start_is_refused() -> None:
    worker = make_worker()

    with pytest.raises(ConfigError, match="after the start"):
        worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)


def test_a_second_all_reduce_before_the_first_is_over_is_refused() -> None:
    worker = started().workers[0]
    worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)

    with pytest.raises(ConfigError, match="one all-reduce at a time"):
        worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)


@pytest.mark.parametrize(
    "values",
    [
        np.ones(999, np.float32),
        np.ones(1000, np.float64),
        np.ones((10, 100), np.float32),
        np.ones(2000, np.float32)[::2],
    ],
    ids=["length", "dtype", "dimensions", "not contiguous"],
)
def test_an_array_that_is_not_the_bucket_is_refused_and_the_next_one_works(
    values: Any,
) -> None:
    net = started()

    with pytest.raises(ShapeError):
        net.workers[0].all_reduce(values, 1.0, net.now)
    good = [np.full(1000, value, np.float32) for value in (1.0, 2.0)]
    net.all_reduce(good, [1.0, 1.0])

    assert good[0].tolist() == [1.5] * 1000


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e31, 1e-31])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    worker = started().workers[0]

    with pytest.raises(ConfigError, match="weight is 0 or 1e-30 to 1e30"):
        worker.all_reduce(np.ones(1000, np.float32), weight, 0.0)

    assert worker.error is None


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_loss_scale_out_of_range_is_refused(scale: float) -> None:
    worker = started().workers[0]

    with pytest.raises(ConfigError, match="loss_scale 1e-30 to 1e30"):
        worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0, loss_scale=scale)


def test_buckets_take_turns_each_in_its_own_dtype_and_length() -> None:
    buckets = (
        BucketSpec("float32", ("a", "b"), ((3, 5), (7,))),
        BucketSpec("float64", ("c",), ((900,),)),
        BucketSpec("float16", ("d",), ((1,),)),
    )
    net = FakeNet(2, buckets, LossBound.fixed(0.0))
    net.start()
    sizes = ((22, np.float32), (900, np.float64), (1, np.float16)) * 2

    for turn, (num, dtype) in enumerate(sizes):
        assert net.workers[0].next_bucket == turn % 3
        values: list[Any] = [np.full(num, turn + rank, dtype) for rank in (1, 2)]
        events = net.all_reduce(values, [1.0, 1.0])
        assert values[1].tolist() == [turn + 1.5] * num
        assert (events[0].counter, events[0].bucket) == (1 + turn, turn % 3)


def test_the_loss_scale_is_taken_out_of_the_norm() -> None:
    net = started()
    for worker in net.workers:
        values = np.full(1000, 64.0, np.float32)
        worker.all_reduce(values, 1.0, net.now, loss_scale=32.0)

    (event, _) = net.run_until(Reduced)

    # sqrt(1000) * 2
    assert event.norm == pytest.approx(63.2455532)


def test_a_round_over_a_clean_link_reports_what_it_cost_both_ways() -> None:
    """1 ms each way: 1 ms until the probe is there, 1 ms until the stop is here."""
    delay = Impairments(delay_s=0.001)
    net = started(to_server=delay, to_worker=delay)

    events = net.all_reduce([np.ones(1000, np.float32)] * 2, [1.0, 1.0])

    way_in, way_back = events[1].reports
    assert (way_in.rank, way_in.direction, way_in.counter) == (1, "in", 1)
    assert (way_in.num_chunks, way_in.num_bytes, way_in.p) == (3, 4000, 0.0)
    assert (way_in.sends, way_in.probes, way_in.sent) == (1, 1, 3)
    assert (way_in.missing, way_in.retransmitted) == (0, 0)
    assert way_in.latency_s == pytest.approx(0.002)
    assert way_in.waiting_s == pytest.approx(0.002)
    assert not way_in.early_stop
    assert (way_back.rank, way_back.direction, way_back.p) == (1, "back", 0.0)
    assert (way_back.sends, way_back.probes, way_back.sent) == (1, 0, 3)
    assert (way_back.missing, way_back.retransmitted) == (0, 0)
    assert way_back.latency_s == pytest.approx(0.0)


def test_a_goodbye_is_answered_with_the_end() -> None:
    net = started()
    worker = net.workers[0]

    worker.close()
    net.deliver()
    worker.close()

    (event,) = net.run_until(Ended, (0,))
    assert event == Ended()
    assert worker.next_control(0) is None


def test_a_worker_that_never_started_says_no_goodbye() -> None:
    worker = make_worker()
    assert worker.next_control(0) is not None  # hello

    worker.close()
    WorkerEndpoint(0, 1, VECTOR, LossBound(), timeout_s=1.0, silence_s=1.0).close()

    assert worker.next_control(0) is None


# -- failure --------------------------------------------------------------------


def test_a_refusal_becomes_a_handshake_error_with_both_values() -> None:
    worker = make_worker()

    tell(worker, Refuse("rank", "0 is taken (the server)", "0 of 2", "check RANK"))

    assert isinstance(worker.error, HandshakeError)
    assert str(worker.error) == (
        "rank differs: 0 is taken (the server) here, 0 of 2 there; check RANK"
    )
    assert worker.next_event() == Failed(worker.error)


def test_the_failure_of_another_rank_carries_its_name_and_message() -> None:
    worker = started().workers[0]

    tell(worker, Fail("rank 1", (), "round 7", "CUDA out of memory"))

    assert isinstance(worker.error, RemoteError)
    assert str(worker.error) == "rank 1 ended the job: CUDA out of memory"


def test_the_loss_of_other_ranks_carries_all_their_names() -> None:
    worker = started().workers[0]

    tell(worker, Fail("the server", ("rank 1", "rank 2"), "round 7", "gone"))

    assert isinstance(worker.error, PeerLostError)
    assert worker.error.peers == ("rank 1", "rank 2")
    assert worker.error.phase == "round 7"


def test_the_servers_connection_closing_names_the_server_and_the_phase() -> None:
    net = started()
    net.all_reduce([np.ones(1000, np.float32)] * 2, [1.0, 1.0])

    net.workers[0].lose_link(0, "its connection closed", net.now)

    assert str(net.workers[0].error).startswith(
        "lost the server during the pause after round 1 (its connection closed)"
    )


def test_a_server_that_closes_before_the_start_names_the_start() -> None:
    worker = make_worker()

    worker.lose_link(0, "its connection closed", 0.0)

    assert "lost the server during start-up" in str(worker.error)


def test_a_server_that_never_starts_the_job_is_given_up() -> None:
    """Its own deadline is 60 s; a program of another kind has none."""
    worker = make_worker()

    assert worker.timer() == 76.0
    worker.handle_timer(75.9)
    assert not worker.has_failed
    worker.handle_timer(76.0)

    assert isinstance(worker.error, UnreachableError)
    assert "never started the job" in str(worker.error)


@pytest.mark.parametrize(("weight", "deadline_s"), [(1.0, 60.0), (0.0, 76.0)])
def test_a_server_that_falls_silent_is_named_at_the_deadline(
    weight: float, deadline_s: float
) -> None:
    """With data under way at the timeout, else at 1.25 timeouts and a second."""
    worker = started(timeout_s=60.0).workers[0]
    worker.all_reduce(np.ones(1000, np.float32), weight, 0.0)
    out = memoryview(bytearray(65535))
    worker.next_datagrams(0, out, 0.0, max_segments=64, max_bytes=65535)

    assert worker.timer() == deadline_s
    worker.handle_timer(deadline_s - 0.001)
    assert not worker.has_failed
    worker.handle_timer(deadline_s)

    assert isinstance(worker.error, RoundTimeoutError)
    assert worker.error.peer == "the server"
    assert worker.timer() is None


def test_a_server_that_stops_the_gradient_and_sends_no_mean_is_named() -> None:
    net = FakeNet(1, VECTOR, LossBound(), timeout_s=60.0)
    net.start()
    worker = net.workers[0]
    worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)
    out = memoryview(bytearray(65535))
    for _ in range(2):  # the short last chunk ends a batch
        sizes = worker.next_datagrams(0, out, 0.0, max_segments=64, max_bytes=65535)
        assert sizes is not None
        net.server.receive_datagrams(0, out, *sizes, 0.0)
    net.server.settle(0.0)
    stop = net.server.next_control(0)
    assert stop is not None
    worker.receive_control(0, stop, 0.0)

    worker.handle_timer(75.9)
    assert not worker.has_failed
    worker.handle_timer(76.0)

    assert "the server did not finish the mean of round 1" in str(worker.error)


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, 0, 2, "little", VECTOR, LossBound(), 1500, 7000, 1 << 20),
        Welcome(5, 7001, (1472,)),
        Start(1448, 1 << 20),
        Mean(1, 0, 1.0, 0.0, True, 1.0, None, ""),
        GatherPart(2, 1, 0, b"x"),
        GatherPart(0, 1, 1, b"x"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_server_that_breaks_the_protocol_is_named(message: Message) -> None:
    worker = started().workers[0]

    tell(worker, message)

    assert isinstance(worker.error, PeerProtocolError)
    assert worker.error.peer == "the server"


@pytest.mark.parametrize(
    "message",
    [Start(1448, 1 << 20), Welcome(-1, 7001, (1472,)), Welcome(5, 7001, ())],
    ids=["start", "session", "no sizes"],
)
def test_a_server_that_starts_badly_is_named(message: Message) -> None:
    worker = make_worker()

    tell(worker, message)

    assert isinstance(worker.error, PeerProtocolError)
    assert worker.error.peer == "the server"


def test_a_mean_of_another_round_breaks_the_protocol() -> None:
    worker = started().workers[0]
    worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)

    tell(worker, Mean(2, 0, 1.0, 0.0, True, 1.0, None, ""))

    assert isinstance(worker.error, PeerProtocolError)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_bound_out_of_range_breaks_the_protocol(p: float) -> None:
    worker = started().workers[0]
    worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)

    tell(worker, Mean(1, 0, 1.0, p, True, 1.0, None, ""))

    assert isinstance(worker.error, PeerProtocolError)


def test_a_bitmap_that_nobody_asked_for_breaks_the_protocol() -> None:
    worker = started().workers[0]
    worker.all_reduce(np.ones(1000, np.float32), 1.0, 0.0)

    tell(worker, Bitmap(1, 0, 0, b"\x00"))  # type: ignore[arg-type]

    assert isinstance(worker.error, PeerProtocolError)


def test_an_answer_to_a_round_that_is_over_is_late_and_not_wrong() -> None:
    net = started()
    net.all_reduce([np.ones(1000, np.float32)] * 2, [1.0, 1.0])

    tell(net.workers[0], Bitmap(1, 0, 0, b"\x00"))  # type: ignore[arg-type]

    assert net.workers[0].error is None


def test_the_first_failure_counts_and_the_endpoint_goes_quiet() -> None:
    worker = started().workers[0]
    while worker.next_control(0) is not None:
        pass
    worker.fail(RemoteError("rank 0", "first"))

    tell(worker, Bye())
    worker.receive_datagrams(0, memoryview(bytes(100)), 100, 100, 0.0)
    worker.settle(0.0)
    worker.handle_timer(1e9)
    worker.lose_link(0, "its connection closed", 0.0)
    worker.close()

    assert str(worker.error) == "rank 0 ended the job: first"
    out = memoryview(bytearray(65535))
    sent = worker.next_datagrams(0, out, 0.0, max_segments=64, max_bytes=65535)
    assert sent is None
    assert worker.next_control(0) is not None  # what the server is told
    assert worker.next_control(0) is None
    assert worker.timer() is None


def test_the_start_says_how_much_of_a_datagram_is_gradient() -> None:
    net = FakeNet(2, VECTOR, LossBound(), mtu=1500)

    events = net.start()

    assert events == [Started(2, 1448), Started(2, 1448)]

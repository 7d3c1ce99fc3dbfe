"""Bytes and messages that no honest peer sends: they are counted, or end the job.

Decoders may only raise WireError. A running job may only go on or end on every rank
with a TailboundError, within its deadlines.
"""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tailbound.config import LossBound
from tailbound.errors import PeerProtocolError, TailboundError, WireError
from tailbound.impairments import Impairments
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import Direction, Reduced, RoundKey, Started
from tailbound.protocol.headers import BucketBytes, HeaderTable
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Begin,
    Bitmap,
    BucketSpec,
    Bye,
    Fail,
    GatherPart,
    Hello,
    Mark,
    MarkSeen,
    Mean,
    MeshHello,
    Message,
    Nudge,
    PingSeen,
    Probe,
    Ready,
    Refuse,
    ShardBegin,
    ShardMean,
    Start,
    Stop,
    Welcome,
)
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.wire import (
    ControlReader,
    decode_control_untrusted,
    encode_control,
    headers_untrusted,
    make_header,
    make_ping,
    unpack_bits_untrusted,
)
from tailbound.protocol.worker import LINK
from tailbound.testing import FakeMesh, FakeNet

pytestmark = pytest.mark.slow

BUCKET = BucketSpec("float32", ("weight", "bias"), ((1000,), (3,)))
BOUND = LossBound(p_low=0.25, p_high=0.5)
HELLO = Hello(1, 0, 1, "little", (BUCKET,), BOUND, 1500, 40000, 1 << 20)

# -- strategies ------------------------------------------------------------------

whole_numbers = st.sampled_from(
    [-(2**63), -1, 0, 1, 2, 3, 7, 24, 1448, 65536, 2**32, 2**62, 2**63, 2**64 - 1]
)
numbers = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 5e-324, 0.25, 1.0, 1e308]
)
lengths = st.sampled_from([-1, 0, 1, 2, 3, 2**34 + 1, 2**40, 2**63, 2**64 - 1])
texts = st.sampled_from(["", "float32", "rank 1", "\x00", "ä" * 100])
counters = st.sampled_from([1, 1, 1, 2, 0, -1, 2**32 - 1, 2**64 - 1])
buckets = st.sampled_from([0, 0, 0, 1, -1, 2**16])
bits = st.sampled_from([b"", b"\x00", b"\x60", b"\xe0", b"\xff", bytes(2), bytes(999)])
directions = st.sampled_from(Direction)

specs = st.builds(
    BucketSpec,
    st.sampled_from(["float32", "float64", "float16", "bfloat16", "int8", ""]),
    st.lists(texts, max_size=3).map(tuple),
    st.lists(st.lists(lengths, max_size=3).map(tuple), max_size=3).map(tuple),
)
bounds = st.builds(
    LossBound,
    p_low=st.just(0.25),
    p_high=st.just(0.5),
    frequency=st.sampled_from([1, 2**62]),
    window=st.sampled_from([1, 2, 1 << 20, 2**62, 2**63 - 1]),
    order=st.sampled_from(["rotate", "norm"]),
    holes=st.sampled_from(["zero", "received_mean", "residual"]),
    per_layer=st.booleans(),
)
hellos = st.builds(
    Hello,
    st.sampled_from([1, 1, 1, 0, 2, -1]),
    st.sampled_from([0, 0, 0, 1, -1, 65535, 2**63]),
    st.sampled_from([1, 1, 1, 0, -1, 2, 2**63]),
    st.sampled_from(["little", "big", ""]),
    st.one_of(st.just((BUCKET,)), st.lists(specs, max_size=3).map(tuple)),
    st.one_of(st.just(BOUND), bounds),
    st.sampled_from([1500, 1500, 576, 0, -1, 52, 100, 65536, 2**63]),
    st.sampled_from([40000, 40000, 0, -1, 65536, 2**63]),
    whole_numbers,
)
round_names = (counters, buckets, directions)
messages: st.SearchStrategy[Message] = st.one_of(
    hellos,
    st.builds(
        Welcome,
        whole_numbers,
        whole_numbers,
        st.lists(whole_numbers, max_size=4).map(tuple),
    ),
    st.builds(Refuse, texts, texts, texts, texts),
    st.builds(PingSeen, whole_numbers),
    st.builds(Start, whole_numbers, whole_numbers),
    st.builds(Begin, counters, buckets, numbers, st.none() | numbers, numbers),
    st.builds(
        Mean,
        counters,
        buckets,
        numbers,
        numbers,
        st.booleans(),
        numbers,
        st.none() | numbers,
        texts,
    ),
    st.builds(Probe, *round_names),
    st.builds(Bitmap, *round_names, bits),
    st.builds(Stop, *round_names, bits),
    st.builds(Mark, *round_names, whole_numbers),
    st.builds(MarkSeen, *round_names, whole_numbers),
    st.builds(
        GatherPart,
        st.sampled_from([0, 1, 2, -1, 2**63]),
        whole_numbers,
        whole_numbers,
        st.sampled_from([b"", b"x", b"xyz"]),
    ),
    st.builds(Fail, texts, st.lists(texts, max_size=2).map(tuple), texts, texts),
    st.sampled_from([Bye(), Nudge()]),
    st.builds(
        MeshHello,
        st.sampled_from([1, 1, 1, 0, -1]),
        st.sampled_from([0, 1, 1, 2, -1, 2**63]),
        st.sampled_from([2, 2, 1, -1, 2**63]),
        st.sampled_from(["little", "big"]),
        st.sampled_from([1, 1, 1, 0, -1, 2**64 - 1]),
        st.one_of(st.just(BOUND), bounds),
        whole_numbers,
        whole_numbers,
        whole_numbers,
    ),
    st.builds(Ready, whole_numbers, whole_numbers),
    st.builds(
        ShardBegin,
        counters,
        buckets,
        st.sampled_from([0, 1, 2, -1, 2**63]),
        st.booleans(),
        st.sampled_from(["float32", "bfloat16", "int8", ""]),
        st.sampled_from([3, 3, 0, -1, 1000, 2**40, 2**63]),
        st.sampled_from([1, 1, 0, -1, 2, 2**63]),
        numbers,
        st.none() | numbers,
        numbers,
        numbers,
        whole_numbers,
    ),
    st.builds(
        ShardMean,
        counters,
        buckets,
        st.lists(numbers, max_size=2).map(tuple),
        whole_numbers,
        whole_numbers,
    ),
)


@st.composite
def mutated(draw: st.DrawFn, base: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that are cut short, flipped in places, or longer than they were."""
    data = bytearray(draw(base))
    kind = draw(st.sampled_from(["truncate", "flip", "extend", "as it is"]))
    if kind == "truncate":
        del data[draw(st.integers(0, max(0, len(data) - 1))) :]
    elif kind == "extend":
        data += draw(st.binary(min_size=1, max_size=40))
    elif kind == "flip":
        for _ in range(draw(st.integers(1, 4)) if data else 0):
            place = draw(st.integers(0, len(data) - 1))
            data[place] ^= draw(st.integers(1, 255))
    return bytes(data)


frames = messages.map(encode_control)

# -- decoders --------------------------------------------------------------------


@settings(max_examples=200)
@given(mutated(frames.map(lambda frame: frame[4:])) | st.binary(max_size=60))
def test_a_body_is_a_message_or_a_wire_error(body: bytes) -> None:
    try:
        message = decode_control_untrusted(body)
    except WireError:
        return
    assert decode_control_untrusted(encode_control(message)[4:]) is not None


@settings(max_examples=80)
@given(
    stream=mutated(st.lists(frames, max_size=4).map(b"".join)),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
def test_a_stream_gives_the_same_however_it_is_cut(
    stream: bytes, cuts: list[int]
) -> None:
    def read(parts: list[bytes]) -> tuple[list[bytes], str]:
        reader = ControlReader()
        found = []
        try:
            for part in parts:
                for message in reader.feed_untrusted(part):
                    found.append(encode_control(message))  # noqa: PERF401
        except WireError as error:
            return found, str(error)
        return found, ""

    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[a:b] for a, b in itertools.pairwise(places)]

    assert read(parts) == read([stream])


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(1, 8), st.integers(0, 70))
def test_headers_are_viewed_or_refused(
    data: bytes, num_segments: int, segment_bytes: int
) -> None:
    try:
        headers_K = headers_untrusted(memoryview(data), num_segments, segment_bytes)
    except WireError:
        assert segment_bytes < 24 or num_segments * segment_bytes > len(data)
    else:
        assert headers_K["rank"].shape == (num_segments,)


@settings(max_examples=100)
@given(st.binary(max_size=20), st.integers(1, 170))
def test_a_bitmap_is_read_or_refused(data: bytes, num_chunks: int) -> None:
    try:
        arrived_C = unpack_bits_untrusted(data, num_chunks)
    except WireError:
        assert len(data) * 8 < num_chunks or len(data) * 8 >= num_chunks + 8
    else:
        assert arrived_C.shape == (num_chunks,)


# -- a running job ---------------------------------------------------------------


def make_net(late: str = "") -> FakeNet:
    """Two workers; what goes to the late side is an eighth of a second late."""
    slow, fast = Impairments(delay_s=0.125), Impairments()
    return FakeNet(
        2,
        (BUCKET,),
        BOUND,
        to_server=slow if late == "server" else fast,
        to_worker=slow if late == "worker" else fast,
        timeout_s=2.0,
        silence_s=1.0,
    )


def begin_round(net: FakeNet) -> None:
    for worker in net.workers:
        if worker.error is None:
            worker.all_reduce(np.ones(1003, np.float32), 1.0, net.now)


def check_end(net: FakeNet) -> None:
    """After its longest deadline a job has either reduced or failed, on all ranks."""
    net.run_for(8.0)
    errors = [endpoint.error for endpoint in (net.server, *net.workers)]
    if any(error is not None for error in errors):
        assert all(isinstance(error, TailboundError) for error in errors)
    else:
        assert len(net.run_until(Reduced)) == 2


def check_start(net: FakeNet) -> None:
    """After its longest deadline a job has either started or failed, on all ranks."""
    net.run_for(8.0)
    errors = [endpoint.error for endpoint in (net.server, *net.workers)]
    if any(error is not None for error in errors):
        assert all(isinstance(error, TailboundError) for error in errors)
    else:
        assert len(net.run_until(Started)) == 2


def target(net: FakeNet, side: str) -> tuple[Endpoint, int]:
    return (net.server, 0) if side == "server" else (net.workers[0], LINK)


sides = st.sampled_from(["server", "worker"])


LAYOUT = ChunkLayout(1003, itemsize=4, room_bytes=1448)
"""Two full chunks and a short one."""
SESSION = 1
"""Of a fake network with seed 0."""


def chunks_of_round(side: str, chunks: list[int]) -> bytes:
    """Datagrams of the open round, as this side expects them from its peer."""
    key = RoundKey(1, 0, Direction.IN if side == "server" else Direction.BACK)
    table = HeaderTable(LAYOUT, key, SESSION, 0 if side == "server" else 65535)
    rows = BucketBytes(np.ones(1003, np.float32), LAYOUT)
    out = bytearray(len(chunks) * LAYOUT.segment_bytes)
    return bytes(out[: rows.pack(np.array(chunks), table, memoryview(out))])


def job_in(phase: str, side: str) -> FakeNet:
    """A job that has come so far.

    In ``gradient`` and ``mean`` the sender on this side waits for its bitmap, or the
    receiver on this side has rank 0's probe and none of the datagrams.
    """
    sends = (phase, side) in (("gradient", "worker"), ("mean", "server"))
    net = make_net(("worker" if side == "server" else "server") if sends else "")
    if phase == "meeting":
        return net
    if phase == "checking":
        net.turn()
        return net
    net.start()
    if phase == "idle":
        net.workers[1].all_reduce(np.ones(1003, np.float32), 1.0, net.now)
        net.deliver()
        return net
    if not sends:
        net.cut_udp(
            from_ranks=[0] if phase == "gradient" else [],
            to_ranks=[0] if phase == "mean" else [],
        )
    begin_round(net)
    net.run_for(0.0625)
    return net


GRADIENT, MEAN = (1, 0, Direction.IN), (1, 0, Direction.BACK)
HONEST: list[tuple[str, str, Message]] = [
    ("meeting", "worker", Welcome(SESSION, 40001, (1472, 1232, 548))),
    ("checking", "worker", PingSeen(1472)),
    ("checking", "server", PingSeen(1472)),
    ("checking", "worker", Start(1448, 1 << 20)),
    ("idle", "server", Begin(1, 0, 1.0, 0.1, 1.0)),
    ("gradient", "server", Begin(1, 0, 1.0, 0.1, 1.0)),
    ("gradient", "server", Probe(*GRADIENT)),
    ("gradient", "server", Mark(*GRADIENT, 1000)),
    ("gradient", "server", GatherPart(0, 4, 0, b"abcd")),
    ("gradient", "worker", GatherPart(1, 4, 0, b"abcd")),
    ("gradient", "worker", Bitmap(*GRADIENT, b"\x40")),
    ("gradient", "worker", Stop(*GRADIENT, b"\xe0")),
    ("gradient", "worker", MarkSeen(*GRADIENT, 1000)),
    ("gradient", "worker", Mean(1, 0, 2.0, 0.25, True, 1.0, None, "no check")),
    ("mean", "worker", Mean(1, 0, 2.0, 0.25, True, 1.0, 0.5, "no check")),
    ("mean", "worker", Probe(*MEAN)),
    ("mean", "worker", Mark(*MEAN, 1000)),
    ("mean", "server", Bitmap(*MEAN, b"\x40")),
    ("mean", "server", Stop(*MEAN, b"\xe0")),
    ("mean", "server", MarkSeen(*MEAN, 1000)),
    ("mean", "server", Fail("rank 0", ("rank 1",), "start-up", "it ended")),
    ("mean", "worker", Fail("rank 1", (), "start-up", "it ended")),
    ("mean", "worker", Refuse("dtype", "float32", "float16", "change it")),
]
ABSURD: dict[type, list[Any]] = {
    int: [-(2**63), -1, 0, 25, 65536, 2**62, 2**63, 2**64 - 1],
    float: [float("nan"), float("inf"), -1.0, 0.0, 5e-324, 1e300],
    str: ["", "\x00", "ä" * 5000],
    bytes: [b"", b"\x00", b"\xff", bytes(999)],
    tuple: [(), (0,), (-1,), (2**63, 548), (548, 1472), (1472, 1471, 1470, 1469)],
    Direction: [Direction.IN, Direction.BACK],
    bool: [True, False],
    type(None): [float("nan"), -1.0],
}


def absurd_variants(message: Message) -> list[bytes]:
    """The honest message, and it with one field at a time out of all reason."""
    frames = [encode_control(message)]
    for name in message.__struct_fields__:
        for value in ABSURD[type(getattr(message, name))]:
            is_names = name == "peers" and isinstance(value, tuple)
            changed = tuple(str(item) for item in value) if is_names else value
            frames.append(encode_control(replace(message, **{name: changed})))
    return frames


@pytest.mark.parametrize(
    ("phase", "side", "message"),
    HONEST,
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_field_out_of_all_reason_ends_in_good_order(
    phase: str, side: str, message: Message
) -> None:
    for frame in absurd_variants(message):
        net = job_in(phase, side)
        endpoint, link = target(net, side)

        endpoint.receive_control(link, frame, net.now)
        if phase == "idle":
            data = chunks_of_round(side, [0, 1, 2])
            endpoint.receive_datagrams(link, memoryview(data), len(data), 1472, net.now)
        if phase == "checking" and net.workers[0].plan is not None:
            net.workers[0].all_reduce(np.ones(1003, np.float32), 1.0, net.now)

        net.mend_udp()
        if phase in ("meeting", "checking"):
            check_start(net)
        else:
            check_end(net)


@settings(max_examples=60)
@given(side=sides, data=mutated(st.lists(frames, max_size=2).map(b"".join)))
def test_any_control_bytes_in_the_middle_of_a_round_end_it_in_good_order(
    side: str, data: bytes
) -> None:
    net = job_in("gradient", side)
    endpoint, link = target(net, side)

    endpoint.receive_control(link, data, net.now)

    net.mend_udp()
    check_end(net)


@settings(max_examples=60)
@given(
    side=sides,
    turns=st.integers(0, 6),
    data=st.lists(messages, min_size=1, max_size=3),
)
def test_any_messages_while_meeting_end_in_good_order(
    side: str, turns: int, data: list[Message]
) -> None:
    net = make_net()
    for _ in range(turns):
        net.turn()
    endpoint, link = target(net, side)

    for message in data:
        endpoint.receive_control(link, encode_control(message), net.now)

    check_start(net)


@st.composite
def datagram_batches(draw: st.DrawFn) -> tuple[str, bytes, int]:
    """Side, bytes, and the size in which the kernel says that they came."""
    side = draw(sides)
    chunks = draw(st.sampled_from([[0], [2], [0, 1], [1, 0], [0, 1, 2], [1, 2]]))
    sound = st.just(chunks_of_round(side, chunks))
    data = draw(mutated(sound | st.binary(min_size=1, max_size=99)))
    return side, data, draw(st.sampled_from([1472, 1472, 1, 23, 24, 25, 100, 65535]))


def test_datagrams_that_are_not_mutated_are_accepted() -> None:
    net = make_net()
    net.start()
    begin_round(net)
    for side, chunks in (("server", [0, 1, 2]), ("worker", [1, 0])):
        data = chunks_of_round(side, chunks)
        endpoint, link = target(net, side)

        endpoint.receive_datagrams(link, memoryview(data), len(data), 1472, net.now)

        assert endpoint.counters().accepted == len(chunks)


@settings(max_examples=80)
@given(batch=datagram_batches(), is_open=st.booleans())
@example(batch=("server", bytes(24), 24), is_open=True)
def test_any_datagrams_are_taken_or_counted_and_the_round_goes_on(
    batch: tuple[str, bytes, int], is_open: bool
) -> None:
    side, data, segment_bytes = batch
    net = make_net()
    net.start()
    assert net.server.session == SESSION
    if is_open:
        begin_round(net)
    endpoint, link = target(net, side)
    before = endpoint.counters()

    endpoint.receive_datagrams(
        link, memoryview(data), len(data), segment_bytes, net.now
    )

    counted = endpoint.counters()
    num = -(-len(data) // segment_bytes)
    pings = num - sum(
        getattr(counted, name) - getattr(before, name)
        for name in ("accepted", "stale", "foreign", "malformed")
    )
    assert 0 <= pings <= num
    if not is_open:
        begin_round(net)
    check_end(net)
    assert net.server.error is None


# -- strangers -------------------------------------------------------------------


def make_server(world_size: int = 1) -> ServerEndpoint:
    server = ServerEndpoint(
        world_size, 77, now=0.0, timeout_s=10.0, silence_s=5.0, join_timeout_s=10.0
    )
    server.accept(0, Link(-1, "a new connection", "here", udp_port=5))
    return server


def drain(endpoint: Endpoint, link: int) -> list[Message]:
    found: list[Message] = []
    while link in endpoint.links and (data := endpoint.next_control(link)) is not None:
        found.append(decode_control_untrusted(data[4:]))
    return found


def walk(server: ServerEndpoint, hello: Hello) -> None:
    """Do all that a worker with this hello would do, as far as the server lets it."""
    server.receive_control(0, encode_control(hello), 0.0)
    welcomes = [message for message in drain(server, 0) if isinstance(message, Welcome)]
    if not welcomes:
        return
    (welcome,) = welcomes
    for size in welcome.ping_bytes:
        ping = make_ping(welcome.session, hello.rank, size)
        server.receive_datagrams(0, memoryview(ping), size, size, 0.1)
        server.receive_control(0, encode_control(PingSeen(size)), 0.1)
    server.settle(0.2)
    server.handle_timer(0.5)
    assert server.plan is not None
    key = server.plan.key(0, Direction.IN)
    layout = server.plan.layout(0)
    table = HeaderTable(layout, key, welcome.session, hello.rank)
    values_N = np.full(layout.num_elements, 3, f"<u{layout.itemsize}")
    out = bytearray(layout.segment_bytes)
    for chunk in range(layout.num_chunks):
        rows = BucketBytes(values_N, layout)
        end = rows.pack(np.array([chunk]), table, memoryview(out))
        server.receive_datagrams(0, memoryview(out), end, end, 0.6)
    begin = Begin(key.counter, key.bucket, 1.0, None, 1.0)
    server.receive_control(0, encode_control(begin), 0.6)
    server.settle(0.7)
    server.handle_timer(0.8)
    assert any(isinstance(message, Mean) for message in drain(server, 0))


def test_a_sound_hello_walks_all_the_way_to_a_mean() -> None:
    server = make_server()

    walk(server, HELLO)

    assert server.error is None


@settings(max_examples=250)
@given(hellos)
def test_any_hello_is_refused_or_works_all_the_way(hello: Hello) -> None:
    server = make_server()

    walk(server, hello)

    assert server.error is None or isinstance(server.error, TailboundError)


@settings(max_examples=100)
@given(mutated(frames) | st.binary(max_size=60))
def test_a_stranger_takes_no_link_but_its_own(data: bytes) -> None:
    server = make_server(world_size=2)
    server.receive_control(0, encode_control(replace(HELLO, world_size=2)), 0.0)
    server.accept(1, Link(-1, "a new connection", "there", udp_port=6))

    server.receive_control(1, data, 0.1)
    if 1 in server.links:
        server.receive_datagrams(1, memoryview(bytes(100)), 100, 50, 0.1)

    assert 0 in server.links
    assert server.error is None or isinstance(server.error, TailboundError)


@settings(max_examples=60)
@given(data=mutated(frames), is_udp=st.booleans())
def test_a_stranger_cannot_disturb_a_running_job(data: bytes, is_udp: bool) -> None:
    net = make_net()
    net.start()
    begin_round(net)
    net.server.accept(9, Link(-1, "a new connection", "there", udp_port=6))

    if is_udp and data:
        num = len(data)
        net.server.receive_datagrams(9, memoryview(data), num, num, net.now)
    else:
        net.server.receive_control(9, data, net.now)

    net.run_until(Reduced)
    net.close()


def test_more_gradients_than_memory_end_the_job_with_a_message() -> None:
    """More than the address space; each is within what one bucket may have."""
    bucket = BucketSpec("float32", ("weight",), ((1 << 32,),))
    server = make_server()
    server.receive_control(
        0, encode_control(replace(HELLO, buckets=(bucket,) * 10_000)), 0.0
    )
    server.receive_control(0, encode_control(PingSeen(1472)), 0.1)
    ping = make_ping(77, 0, 1472)
    server.receive_datagrams(0, memoryview(ping), 1472, 1472, 0.1)

    server.settle(0.2)

    assert "no memory for a sum of all gradients" in str(server.error)


# -- a mesh -------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    turns=st.integers(0, 12),
    is_open=st.booleans(),
    data=st.lists(messages, min_size=1, max_size=4),
)
def test_any_messages_leave_a_mesh_in_good_order(
    turns: int, is_open: bool, data: list[Message]
) -> None:
    """It reduces as if nothing had come, or all ranks end with one error."""
    net = FakeMesh(2, BOUND, timeout_s=5.0, silence_s=2.0)
    for _ in range(turns):
        net.turn()
    grads = [np.full(3, rank, np.float32) for rank in (1, 3)]
    has_begun = is_open and all(rank.next_event() for rank in net.ranks)
    if has_begun:
        net.begin(grads, [1.0, 1.0])
    for message in data:
        net.ranks[0].receive_control(1, encode_control(message), net.now)

    net.run_for(10.0)
    if not has_begun and not any(rank.error for rank in net.ranks):
        net.begin(grads, [1.0, 1.0])
        net.run_for(10.0)

    errors = [rank.error for rank in net.ranks]
    assert all(errors) or not any(errors)
    assert any(errors) or (grads[0] == grads[1]).all()


@settings(max_examples=100)
@given(data=mutated(st.binary(min_size=24, max_size=99)), segment=st.integers(1, 99))
def test_any_datagrams_are_counted_by_a_mesh_and_the_round_goes_on(
    data: bytes, segment: int
) -> None:
    net = FakeMesh(2, BOUND)
    net.start()
    grads = [np.full(1000, rank, np.float32) for rank in (1, 3)]
    net.begin(grads, [1.0, 1.0])

    net.ranks[0].receive_datagrams(1, memoryview(data), len(data), segment, net.now)

    net.run_until(Reduced)
    assert (grads[0] == 2.0).all()


# -- what fuzzing found --------------------------------------------------------------


def test_what_follows_a_hello_in_the_same_bytes_is_taken_too() -> None:
    """It cost the link that had just joined, which the server then missed."""
    server = make_server()

    server.receive_control(0, encode_control(HELLO) + encode_control(Bye()), 0.0)

    assert isinstance(server.error, PeerProtocolError)
    assert 0 in server.links


def test_a_datagram_to_a_strangers_port_is_counted() -> None:
    """Its link has rank -1, which no header can hold."""
    net = make_net()
    net.start()
    net.server.accept(9, Link(-1, "a new connection", "there", udp_port=6))

    net.server.receive_datagrams(9, memoryview(bytes(30)), 30, 30, net.now)

    counters = net.server.links[9].counters
    assert counters.stale + counters.foreign + counters.malformed == 1


def test_a_bare_header_is_no_short_last_chunk() -> None:
    """It marked the last full chunk of a bucket without a short one as arrived."""
    bucket = BucketSpec("float32", ("weight",), ((724,),))
    net = FakeNet(1, (bucket,), BOUND, timeout_s=10.0)
    net.start()
    net.workers[0].all_reduce(np.ones(724, np.float32), 1.0, net.now)
    header = make_header(RoundKey(1, 0, Direction.IN), net.server.session, 0)
    header["sequence"] = 2

    net.inject(0, header.tobytes())

    assert net.server.counters().malformed == 1
    assert net.server.counters().accepted == 0

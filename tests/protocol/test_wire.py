"""The bytes: headers, control messages, and what is refused."""

import json
import typing
from pathlib import Path

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import WireError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.headers import BucketBytes, HeaderTable
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
from tailbound.protocol.wire import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    VERSION,
    ControlReader,
    datagram_bytes,
    decode_control_untrusted,
    encode_control,
    headers_untrusted,
    make_header,
    make_ping,
    pack_bits,
    unpack_bits_untrusted,
)

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "frames.json").read_text(encoding="utf-8")
)
SESSION = 0x0123456789ABCDEF
KEY = (2**32 - 1, 2, Direction.BACK)

MESSAGES: tuple[Message, ...] = (
    Hello(
        1,
        2,
        3,
        "little",
        (BucketSpec("float32", ("weight", "bias"), ((3, 2), (3,))),),
        LossBound(p_low=0.25, p_high=0.5),
        1500,
        40000,
        1048576,
    ),
    Welcome(SESSION, 40001, (1472, 1232, 548)),
    Refuse(
        "dtype",
        "float32 (rank 0)",
        "float16 (rank 1)",
        "build the same model on every rank",
    ),
    PingSeen(1472),
    Start(1448, 524288),
    Begin(1, 0, 32.0, 0.125, 1.0, 3.0, 4),
    Mean(1, 0, 96.0, 0.5, False, 2.0, None, "no check", 7.0, 8),
    Probe(*KEY),
    Bitmap(*KEY, b"\xff\x60", 3),
    Stop(*KEY, b"\xff\xe0"),
    Mark(*KEY, 65536),
    MarkSeen(*KEY, 65536),
    GatherPart(1, 5, 2, b"abc"),
    Fail("rank 1", ("rank 0",), "start-up", "it ended"),
    Bye(),
    Nudge(),
    MeshHello(
        1,
        2,
        3,
        "little",
        SESSION,
        LossBound(p_low=0.25, p_high=0.5),
        1500,
        40000,
        1048576,
    ),
    Ready(1448, 524288),
    ShardBegin(1, 0, 7, True, "bfloat16", 70000, 1, 32.0, 0.125, 1.0, 3.0, 4),
    ShardMean(1, 0, (0.25, 2.0), 96, 3),
)


def frame_bytes(hex_of: dict[str, str]) -> bytes:
    return bytes.fromhex("".join(hex_of.values()))


def full_chunk() -> bytes:
    layout = ChunkLayout(600, itemsize=4, room_bytes=8)
    rows = BucketBytes(np.arange(600, dtype="<f4"), layout)
    key = RoundKey(2**32 - 1, 3, Direction.IN)
    out = bytearray(32)
    table = HeaderTable(layout, key, SESSION, rank=2)
    rows.pack(np.array([258]), table, memoryview(out))
    return bytes(out)


def short_chunk() -> bytes:
    layout = ChunkLayout(3, itemsize=2, room_bytes=4)
    rows = BucketBytes(np.array([1, 2, 3], dtype="<f2"), layout)
    key = RoundKey(1, 0, Direction.BACK)
    out = bytearray(26)
    table = HeaderTable(layout, key, SESSION, rank=65535)
    rows.pack(np.array([1]), table, memoryview(out))
    return bytes(out)


def test_the_golden_frames_are_of_this_version() -> None:
    assert GOLDEN["version"] == VERSION


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("full chunk of a gradient", full_chunk()),
        ("short last chunk of a mean", short_chunk()),
        ("ping", make_ping(SESSION, 2, 32)),
    ],
)
def test_a_datagram_is_its_golden_frame(name: str, made: bytes) -> None:
    (golden,) = [frame for frame in GOLDEN["datagrams"] if frame["datagram"] == name]

    assert made.hex() == frame_bytes(golden["hex"]).hex()


@pytest.mark.parametrize(
    "message", MESSAGES, ids=lambda message: type(message).__name__
)
def test_a_control_message_is_its_golden_frame(message: Message) -> None:
    name = type(message).__name__
    (golden,) = [frame for frame in GOLDEN["control"] if frame["message"] == name]
    frame = frame_bytes(golden["hex"])

    assert encode_control(message).hex() == frame.hex()
    assert decode_control_untrusted(frame[4:]) == message
    assert tuple(golden["hex"]) == (
        "length",
        "array",
        "tag",
        *type(message).__struct_fields__,
    )


def test_every_control_message_has_a_golden_frame() -> None:
    kinds = {kind.__name__ for kind in typing.get_args(Message)}

    assert {frame["message"] for frame in GOLDEN["control"]} == kinds
    assert {type(message).__name__ for message in MESSAGES} == kinds


def test_the_header_is_24_bytes_in_network_order() -> None:
    assert HEADER.fields is not None
    assert HEADER_BYTES == 24
    assert {name: field[1] for name, field in HEADER.fields.items()} == {
        "version": 0,
        "kind": 1,
        "bucket": 2,
        "counter": 4,
        "session": 8,
        "sequence": 16,
        "length": 20,
        "rank": 22,
    }


def test_the_first_16_bytes_are_equal_in_all_datagrams_of_a_round() -> None:
    header = make_header(RoundKey(7, 1, Direction.IN), SESSION, rank=3)
    later = header.copy()
    later["sequence"], later["length"] = 2**32 - 1, 65535

    assert PREFIX_BYTES == 16
    assert later.tobytes()[:16] == header.tobytes()[:16]
    assert later.tobytes()[16:] != header.tobytes()[16:]


@pytest.mark.parametrize(
    ("mtu", "ip_version", "expected"),
    [
        (1500, 4, 1472),
        (1500, 6, 1452),
        (9000, 4, 8972),
        (9000, 6, 8952),
        (576, 4, 548),
        (65535, 4, 65507),
        (65536, 4, 65507),
        (65536, 6, 65487),
    ],
)
def test_a_datagram_fills_the_mtu(mtu: int, ip_version: int, expected: int) -> None:
    assert datagram_bytes(mtu, ip_version) == expected


@pytest.mark.parametrize("num_bytes", [24, 25, 548, 1472, 65507])
def test_a_ping_has_exactly_the_bytes_asked_for(num_bytes: int) -> None:
    ping = make_ping(SESSION, 5, num_bytes)

    (header,) = headers_untrusted(memoryview(ping), 1, num_bytes)
    assert len(ping) == num_bytes
    assert header["length"] == num_bytes - 24
    assert header["kind"] == 2


def test_headers_of_a_batch_are_viewed_in_place() -> None:
    batch = b"".join(make_ping(SESSION, rank, 30) for rank in (4, 5, 6))

    headers = headers_untrusted(memoryview(batch), 3, 30)

    assert headers["rank"].tolist() == [4, 5, 6]
    assert headers["session"].tolist() == [SESSION] * 3


@pytest.mark.parametrize(
    ("num_bytes", "num_segments", "segment_bytes"),
    [
        (100, 1, 23),
        (100, 4, 0),
        (23, 1, 24),
        (47, 2, 24),
    ],
)
def test_datagrams_shorter_than_the_header_are_refused(
    num_bytes: int, num_segments: int, segment_bytes: int
) -> None:
    data = memoryview(bytes(num_bytes))

    with pytest.raises(WireError, match="datagrams of"):
        headers_untrusted(data, num_segments, segment_bytes)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((2, 3), (4,)), 10),
        (((),), 1),
        (((0, 5), (2,)), 2),
        ((), 0),
    ],
)
def test_a_bucket_has_the_elements_of_its_tensors(
    shapes: tuple[tuple[int, ...], ...], expected: int
) -> None:
    names = tuple(f"tensor {number}" for number in range(len(shapes)))

    assert BucketSpec("float32", names, shapes).num_elements == expected


def test_a_round_message_names_its_round() -> None:
    assert Probe(9, 1, Direction.BACK).key == RoundKey(9, 1, Direction.BACK)


@pytest.mark.parametrize("weight", [0.0, 1e-30, 0.5, 32.0, 1e30])
def test_a_weight_in_range_may_be_announced(weight: float) -> None:
    assert Begin(1, 0, weight, None, 1.0).is_in_range


@pytest.mark.parametrize(
    ("weight", "loss_scale"),
    [
        (-1.0, 1.0),
        (9e-31, 1.0),
        (1.1e30, 1.0),
        (float("nan"), 1.0),
        (float("inf"), 1.0),
        (1.0, 0.0),
        (1.0, -1.0),
        (1.0, 9e-31),
        (1.0, float("nan")),
        (1.0, float("inf")),
    ],
)
def test_a_weight_or_loss_scale_out_of_range_is_seen(
    weight: float, loss_scale: float
) -> None:
    assert not Begin(1, 0, weight, None, loss_scale).is_in_range


@pytest.mark.parametrize(
    ("computed", "planned", "expected"),
    [
        (0.0, 0, True),
        (2.5, 3, True),
        (3.0, 3, True),
        (3.1, 3, False),
        (-0.5, 3, False),
        (float("nan"), 3, False),
        (1.0, 10**9 + 1, False),
    ],
)
def test_no_more_is_computed_than_was_planned(
    computed: float, planned: int, expected: bool
) -> None:
    begin = Begin(1, 0, 1.0, None, 1.0, computed, planned)
    mean = Mean(1, 0, 1.0, 0.0, False, 1.0, None, "", computed, planned)

    assert begin.is_in_range is expected
    # A sum over ranks has no limit of its own.
    assert mean.is_in_range is (expected or planned > 10**9)


@pytest.mark.parametrize(
    ("total_weight", "p", "expected"),
    [
        (0.0, 0.0, True),
        (96.0, 0.99, True),
        (96.0, 1.0, False),
        (96.0, -0.1, False),
        (96.0, float("nan"), False),
        (-1.0, 0.0, False),
        (float("nan"), 0.0, False),
        (float("inf"), 0.0, False),
    ],
)
def test_a_mean_says_a_share_and_a_number(
    total_weight: float, p: float, expected: bool
) -> None:
    mean = Mean(1, 0, total_weight, p, False, 1.0, None, "")

    assert mean.is_in_range is expected


# -- reading the control stream ------------------------------------------------

STREAM = b"".join(encode_control(message) for message in MESSAGES)


def test_a_stream_fed_whole_gives_every_message() -> None:
    reader = ControlReader()

    assert tuple(reader.feed_untrusted(STREAM)) == MESSAGES


def test_a_stream_fed_byte_by_byte_gives_every_message() -> None:
    reader = ControlReader()

    found = [
        message
        for index in range(len(STREAM))
        for message in reader.feed_untrusted(STREAM[index : index + 1])
    ]

    assert tuple(found) == MESSAGES


def test_trailing_bytes_wait_for_the_rest_of_their_message() -> None:
    reader = ControlReader()
    cut = len(STREAM) - 3

    assert tuple(reader.feed_untrusted(STREAM[:cut])) == MESSAGES[:-1]
    assert tuple(reader.feed_untrusted(memoryview(STREAM)[cut:])) == MESSAGES[-1:]


def test_what_follows_a_message_is_kept_if_the_caller_stops_there() -> None:
    reader = ControlReader()

    first = next(reader.feed_untrusted(STREAM))

    assert first == MESSAGES[0]
    assert tuple(reader.feed_untrusted(b"")) == MESSAGES[1:]


def test_a_message_of_the_largest_length_is_waited_for() -> None:
    reader = ControlReader()

    assert list(reader.feed_untrusted(MAX_FRAME_BYTES.to_bytes(4, "big"))) == []


def test_a_message_of_more_than_8_mib_is_refused_before_it_is_here() -> None:
    reader = ControlReader()

    with pytest.raises(WireError, match="8388609 bytes"):
        list(reader.feed_untrusted(b"\x00\x80\x00\x01"))


def test_messages_before_a_broken_one_are_given() -> None:
    reader = ControlReader()
    messages = reader.feed_untrusted(encode_control(Bye()) + b"\x00\x00\x00\x01\xc1")

    assert next(messages) == Bye()
    with pytest.raises(WireError, match="not a control message"):
        next(messages)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91\xa5Adieu",
        b"\x91\xa5Probe",
        b"\x94\xa5Probe\x01\x02\x07",  # no such direction
        b"\x92\xa8PingSeen\xa1x",
        b"\x92\xa8PingSeen\xc0",
        b"\x91\xa3Bye\x00",  # one byte too many
        b"\x94\xa4Fail\xa2\xff\xfe\x90\xa0",  # not UTF-8
        b"\x95\xa6Bitmap\x01\x02\x00\xc6\xff\xff\xff\xff",  # 4 GiB announced
        b"\xdd\xff\xff\xff\xff\xa3Bye",
        b"\x92\xa3Bye" + b"\x91" * 100_000,  # nested deep in a field that is skipped
    ],
    ids=lambda body: body[:12].hex() or "empty",
)
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not a control message"):
        decode_control_untrusted(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"p_low", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),  # NaN
        (b"p_high", b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"),  # 1.0
        (b"p_high", b"\xcb\x3f\xc0\x00\x00\x00\x00\x00\x00"),  # below p_low
    ],
)
def test_a_loss_bound_out_of_range_is_refused(field: bytes, value: bytes) -> None:
    body = encode_control(MESSAGES[0])[4:]
    start = body.index(field) + len(field)
    changed = body[:start] + value + body[start + 9 :]

    with pytest.raises(WireError, match=r"p_low|p_high"):
        decode_control_untrusted(changed)


# -- bitmaps -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrived", "bits"),
    [
        ([True], "80"),
        ([False], "00"),
        ([True, False, True, False, False, False, False, True], "a1"),
        ([False] * 8 + [True], "0080"),
        ([True] * 11, "ffe0"),
    ],
)
def test_a_bitmap_has_one_bit_a_chunk_most_significant_first(
    arrived: list[bool], bits: str
) -> None:
    assert pack_bits(np.array(arrived)).hex() == bits
    unpacked = unpack_bits_untrusted(bytes.fromhex(bits), len(arrived))
    assert unpacked.dtype == np.bool_
    assert unpacked.tolist() == arrived


def test_what_stands_behind_the_last_bit_is_not_read() -> None:
    assert unpack_bits_untrusted(b"\xbf", 3).tolist() == [True, False, True]


@pytest.mark.parametrize(("num_bytes", "num_chunks"), [(0, 1), (1, 9), (2, 8), (3, 16)])
def test_a_bitmap_of_another_length_is_refused(num_bytes: int, num_chunks: int) -> None:
    with pytest.raises(WireError, match=f"{num_bytes} bytes for {num_chunks} chunks"):
        unpack_bits_untrusted(bytes(num_bytes), num_chunks)

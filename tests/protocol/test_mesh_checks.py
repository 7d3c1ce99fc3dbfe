"""What the ranks of a mesh check of each other's words."""

from typing import Any

import msgspec
import pytest

from tailbound.config import LossBound
from tailbound.errors import HandshakeError, WireError
from tailbound.protocol.mesh_checks import (
    check_begin_untrusted,
    check_ready_untrusted,
    compare_begins,
    compare_hellos,
)
from tailbound.protocol.messages import MeshHello, Ready, ShardBegin

OURS = MeshHello(1, 0, 2, "little", 77, LossBound(), 1500, 40000, 1 << 20)
THEIRS = msgspec.structs.replace(OURS, rank=1)
BEGIN = ShardBegin(1, 0, 1, True, "float32", 100, 1, 1.0, None, 1.0, 1.0, 1)


def test_ranks_that_agree_find_nothing() -> None:
    assert compare_hellos(OURS, THEIRS) is None


@pytest.mark.parametrize(
    ("changes", "field", "ours", "theirs"),
    [
        ({"version": 2}, "protocol version", "1 (rank 0)", "2 (rank 1)"),
        ({"session": 78}, "session", "77 (rank 0)", "78 (rank 1)"),
        ({"world_size": 3}, "number of ranks", "2 (rank 0)", "3 (rank 1)"),
        ({"byte_order": "big"}, "byte order", "little (rank 0)", "big (rank 1)"),
        ({"rank": 2}, "rank", "0 to 1 (rank 0)", "2 (rank 2)"),
        ({"rank": -1}, "rank", "0 to 1 (rank 0)", "-1 (rank -1)"),
        ({"mtu": 575}, "mtu", "576 to 65536 (rank 0)", "575 (rank 1)"),
        ({"udp_port": 0}, "UDP port", "1 to 65535 (rank 0)", "0 (rank 1)"),
    ],
)
def test_what_differs_is_named_with_both_values(
    changes: dict[str, Any], field: str, ours: str, theirs: str
) -> None:
    refusal = compare_hellos(OURS, msgspec.structs.replace(THEIRS, **changes))

    assert refusal is not None
    assert (refusal.field, refusal.ours, refusal.theirs) == (field, ours, theirs)
    assert refusal.remedy


def test_another_bound_is_refused() -> None:
    other = msgspec.structs.replace(THEIRS, bound=LossBound.fixed(0.1))

    refusal = compare_hellos(OURS, other)

    assert refusal is not None
    assert refusal.field == "bound"
    assert "p_low=0.1" in refusal.theirs


def test_a_window_that_would_fill_the_memory_is_refused() -> None:
    bound = LossBound(window=1 << 21)
    pair = [msgspec.structs.replace(hello, bound=bound) for hello in (OURS, THEIRS)]

    refusal = compare_hellos(*pair)

    assert refusal is not None
    assert refusal.field == "LossBound window"


@pytest.mark.parametrize("ready", [Ready(8, 0), Ready(65507, 1 << 40)])
def test_sizes_that_a_datagram_may_have_are_taken(ready: Ready) -> None:
    check_ready_untrusted(ready)


@pytest.mark.parametrize(
    ("ready", "message"),
    [
        (Ready(7, 1), "payload of 7 bytes"),
        (Ready(65508, 1), "payload of 65508 bytes"),
        (Ready(1448, -1), "a queue of -1 bytes"),
    ],
)
def test_other_sizes_are_refused(ready: Ready, message: str) -> None:
    with pytest.raises(WireError, match=message):
        check_ready_untrusted(ready)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"weight": 1e-31},
        {"weight": -1.0},
        {"loss_scale": 0.0},
        {"computed": 2.0},
        {"num_elements": 0},
        {"num_elements": (1 << 32) + 1},
        {"num_norms": 0},
        {"num_norms": (1 << 20) + 1},
        {"bucket": -1},
        {"bucket": 1 << 16},
    ],
    ids=str,
)
def test_an_announcement_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    check_begin_untrusted(BEGIN)

    with pytest.raises(WireError, match="an announcement of"):
        check_begin_untrusted(msgspec.structs.replace(BEGIN, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bucket": 1}, r"order in the step differs: 0 \(rank 2\) here, 1 \(rank 5\)"),
        ({"step": 2}, "step differs: 1"),
        ({"dtype": "float16"}, r"dtype differs: float32 \(rank 2\) here, float16"),
        ({"num_elements": 99}, r"elements of a bucket differs: 100 .* 99 \(rank 5\)"),
        ({"is_last": False}, "last bucket of the step differs: True .* False"),
        ({"num_norms": 2}, "tensors of a bucket differs: 1 .* 2"),
    ],
)
def test_ranks_that_mean_another_round_are_named(
    changes: dict[str, Any], message: str
) -> None:
    compare_begins(2, BEGIN, 5, BEGIN)

    with pytest.raises(HandshakeError, match=message):
        compare_begins(2, BEGIN, 5, msgspec.structs.replace(BEGIN, **changes))

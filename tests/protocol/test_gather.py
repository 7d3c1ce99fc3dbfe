"""The parts of an all-gather."""

import pytest

from tailbound.errors import WireError
from tailbound.protocol.gather import Gather, GatherWatch, cut_pieces
from tailbound.protocol.messages import GatherPart

MIB = 1 << 20


def test_a_contribution_is_cut_into_pieces_of_a_mebibyte() -> None:
    data = bytes(MIB) + b"end"

    assert cut_pieces(2, data) == [
        GatherPart(2, MIB + 3, 0, bytes(MIB)),
        GatherPart(2, MIB + 3, MIB, b"end"),
    ]


def test_a_contribution_of_one_whole_piece_stays_one() -> None:
    assert len(cut_pieces(0, bytes(MIB))) == 1


def test_an_empty_contribution_is_one_empty_piece() -> None:
    assert cut_pieces(1, b"") == [GatherPart(1, 0, 0, b"")]


def test_parts_come_out_in_rank_order_once_all_are_here() -> None:
    gather = Gather(3)
    for rank, data in ((2, b"two"), (0, b""), (1, b"one")):
        assert gather.pop() is None
        for piece in cut_pieces(rank, data):
            gather.receive_untrusted(piece)

    assert gather.pop() == (b"", b"one", b"two")
    assert gather.pop() is None


def test_pieces_are_joined_in_order() -> None:
    gather = Gather(1)
    gather.receive_untrusted(GatherPart(0, 5, 0, b"abc"))
    assert gather.pop() is None

    gather.receive_untrusted(GatherPart(0, 5, 3, b"de"))

    assert gather.pop() == (b"abcde",)


def test_a_fast_ranks_next_contribution_waits_for_the_slow_one() -> None:
    gather = Gather(2)
    for data in (b"first", b"second"):
        gather.receive_untrusted(GatherPart(0, len(data), 0, data))
    gather.receive_untrusted(GatherPart(1, 1, 0, b"x"))

    assert gather.pop() == (b"first", b"x")
    assert gather.pop() is None

    gather.receive_untrusted(GatherPart(1, 1, 0, b"y"))
    assert gather.pop() == (b"second", b"y")


@pytest.mark.parametrize(
    "part",
    [
        GatherPart(-1, 4, 2, b"cd"),
        GatherPart(1, 4, 2, b"cd"),
        GatherPart(0, 4, 0, b"ab"),  # again
        GatherPart(0, 4, 3, b"d"),  # one left out
        GatherPart(0, 4, -2, b"ab"),
        GatherPart(0, 4, 2, b"cde"),  # longer than it said
        GatherPart(0, 3, 2, b"cd"),
        GatherPart(0, -1, 2, b"cd"),
        GatherPart(0, (1 << 32) + 1, 2, b"cd"),
    ],
)
def test_a_piece_that_must_not_come_next_is_refused(part: GatherPart) -> None:
    gather = Gather(1)
    gather.receive_untrusted(GatherPart(0, 4, 0, b"ab"))

    with pytest.raises(WireError, match="gather"):
        gather.receive_untrusted(part)


def test_a_contribution_of_4_gib_may_start() -> None:
    gather = Gather(1)

    gather.receive_untrusted(GatherPart(0, 1 << 32, 0, b"x"))

    assert gather.pop() is None


# -- what the server knows -------------------------------------------------------


def told(watch: GatherWatch, rank: int, total: int, num: int, now: float) -> None:
    """A piece from the start of a rank's contribution."""
    watch.receive_untrusted(GatherPart(rank, total, 0, bytes(num)), now)


def test_a_gather_is_open_from_its_first_piece_until_every_rank_is_in() -> None:
    watch = GatherWatch(3)
    told(watch, 1, 4, 2, now=1.0)
    assert (watch.opened_s, watch.late_ranks) == (1.0, [0, 1, 2])
    watch.receive_untrusted(GatherPart(1, 4, 2, b"cd"), 2.0)
    told(watch, 0, 0, 0, now=3.0)
    assert (watch.opened_s, watch.late_ranks) == (1.0, [2])

    told(watch, 2, 1, 1, now=4.0)
    assert watch.opened_s is None


def test_no_gather_is_open_at_first() -> None:
    assert GatherWatch(3).opened_s is None


def test_the_next_gather_is_open_since_the_last_one_ended() -> None:
    watch = GatherWatch(2)
    told(watch, 0, 1, 1, now=1.0)
    told(watch, 0, 1, 1, now=2.0)

    told(watch, 1, 1, 1, now=5.0)

    assert (watch.opened_s, watch.late_ranks) == (5.0, [1])


@pytest.mark.parametrize(
    "part",
    [
        GatherPart(0, 4, 0, b"ab"),
        GatherPart(0, 4, 3, b"d"),
        GatherPart(0, 4, 2, b"cde"),
        GatherPart(0, -1, 2, b""),
        GatherPart(0, (1 << 32) + 1, 2, b"cd"),
    ],
)
def test_the_server_refuses_a_piece_that_must_not_come_next(part: GatherPart) -> None:
    watch = GatherWatch(1)
    told(watch, 0, 4, 2, now=1.0)

    with pytest.raises(WireError, match="gather bytes"):
        watch.receive_untrusted(part, 2.0)

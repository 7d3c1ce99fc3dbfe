"""How many bytes may be on the way."""

import pytest

from tailbound.errors import WireError
from tailbound.protocol.pacing import Window


def test_a_new_window_is_open() -> None:
    window = Window(400_000)

    assert (window.in_flight_bytes, window.room_bytes) == (0, 400_000)


def test_bytes_on_the_way_take_room_until_their_mark_comes_back() -> None:
    window = Window(400_000)

    assert window.on_sent(100_000) == 100_000
    assert window.on_sent(50_000) is None
    assert (window.in_flight_bytes, window.room_bytes) == (150_000, 250_000)

    window.on_seen_untrusted(100_000)
    assert (window.in_flight_bytes, window.room_bytes) == (50_000, 350_000)


@pytest.mark.parametrize(
    ("sizes", "marks"),
    [
        ([99_999, 1, 99_999, 1], [None, 100_000, None, 200_000]),
        ([100_000, 100_000], [100_000, 200_000]),
        ([60_000, 60_000, 60_000, 60_000], [None, 120_000, None, 240_000]),
        ([350_000, 1], [350_000, None]),
    ],
)
def test_a_mark_is_due_each_quarter_window(
    sizes: list[int], marks: list[int | None]
) -> None:
    window = Window(400_000)

    assert [window.on_sent(size) for size in sizes] == marks


def test_an_older_mark_that_comes_late_takes_nothing_back() -> None:
    window = Window(400_000)
    window.on_sent(200_000)

    window.on_seen_untrusted(150_000)
    window.on_seen_untrusted(100_000)

    assert window.in_flight_bytes == 50_000


def test_a_negative_mark_is_refused() -> None:
    window = Window(400_000)
    window.on_sent(1000)

    with pytest.raises(WireError, match="mark of -1 bytes"):
        window.on_seen_untrusted(-1)
    assert window.in_flight_bytes == 1000


@pytest.mark.parametrize("claimed", [1000, 1001, 2**63])
def test_more_than_was_sent_cannot_have_left_the_queue(claimed: int) -> None:
    window = Window(400_000)
    window.on_sent(1000)

    window.on_seen_untrusted(claimed)

    assert window.room_bytes == 400_000


@pytest.mark.parametrize("asked", [-5, 0, 1, 65_507])
def test_one_full_datagram_always_has_room(asked: int) -> None:
    assert Window(asked).room_bytes == 65_507


def test_a_window_just_above_one_datagram_is_kept() -> None:
    assert Window(65_508).room_bytes == 65_508

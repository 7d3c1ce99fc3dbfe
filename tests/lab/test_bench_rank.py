"""One rank of the benchmark, in threads of the test: known sums, honest checks."""

import io
import os
import threading
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest

from tailbound.config import LossBound, Plan
from tailbound.lab.bench_orders import (
    BenchAnswer,
    Finished,
    Go,
    Host,
    Join,
    Listening,
    Prepare,
    Settle,
    Settled,
    Side,
)
from tailbound.lab.bench_rank import Gradient, follow, parse_sent
from tailbound.lab.orders import Broken, Ready

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:   11       1    0    0    0     0          0         0      22       1    0    0
  eth0: 3300      30    0    0    0     0          0         0    4400      40    0    0
"""


class Played:
    """A rank in a thread of its own, on a pipe."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[BenchAnswer] = SimpleQueue()
        self.code: int | None = None
        reading, writing = os.pipe()
        self._orders = os.fdopen(writing, "wb", buffering=0)
        self._thread = threading.Thread(target=self._follow, args=(reading,))
        self._thread.start()

    def _follow(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as orders:
            self.code = follow(orders, self.answers.put)

    def ask(self, order: msgspec.Struct) -> Any:
        self.tell(order)
        return self.answers.get(timeout=20.0)

    def tell(self, order: msgspec.Struct) -> None:
        self._orders.write(msgspec.json.encode(order) + b"\n")

    def hang_up(self) -> None:
        self._orders.close()

    def end(self) -> int | None:
        self.hang_up()
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        return self.code


def join(
    rank: int,
    world_size: int,
    port: int,
    sides: tuple[Side, ...],
    *,
    plan: Plan = "sharded",
    device: str = "lo",
) -> Join:
    return Join(
        rank=rank,
        world_size=world_size,
        host="127.0.0.1",
        store_port=port,
        device=device,
        num_elements=100_000,
        sides=sides,
        plan=plan,
        bound=LossBound.fixed(0.0),
        seed=3,
        timeout_s=20.0,
    )


def test_the_sum_over_ranks_is_the_known_one_in_any_order_and_round() -> None:
    gradients = [Gradient(200_001, rank, 4, seed=7) for rank in range(4)]
    parts = [np.empty(200_001, np.float32) for _ in range(4)]
    for number in (0, 1, 200):
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.fill(part, number)

        total = parts[2] + parts[0] + parts[3] + parts[1]

        assert np.array_equal(parts[3], 4 * parts[0])
        assert gradients[1].is_reduced(total, number, 1.0)
        assert gradients[2].is_reduced(total / np.float32(4.0), number, 4.0)
        assert not gradients[0].is_reduced(total, number + 1, 1.0)
        total[123_456] += 1.0
        assert not gradients[0].is_reduced(total, number, 1.0)


def test_every_round_has_a_gradient_of_its_own_with_the_same_norm() -> None:
    gradient = Gradient(10_000, 0, 2, seed=0)
    first, second = np.empty((2, 10_000), np.float32)

    gradient.fill(first, 1)
    gradient.fill(second, 2)

    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.sort(second))
    assert np.abs(first).max() == 8.0


def test_what_an_interface_has_sent_is_found() -> None:
    assert parse_sent(NET_DEV, "lo") == 22
    assert parse_sent(NET_DEV, "eth0") == 4400
    with pytest.raises(ValueError, match="there is no interface eth1 here"):
        parse_sent(NET_DEV, "eth1")


@pytest.mark.slow
@pytest.mark.sockets
@pytest.mark.parametrize("plan", ["sharded", "server"])
def test_two_ranks_reduce_with_tailbound(plan: Plan) -> None:
    ranks = [Played(), Played()]
    try:
        there = ranks[0].ask(Host("127.0.0.1", 20.0))
        assert isinstance(there, Listening)
        for rank, played in enumerate(ranks):
            played.tell(join(rank, 2, there.port, ("tailbound",), plan=plan))
        assert all_of(ranks) == [Ready(), Ready()]
        for number in range(2):
            for order in (Prepare(number), Go("tailbound", 0.0), Settle()):
                for played in ranks:
                    played.tell(order)
                answers = all_of(ranks)
            settled = [one for one in answers if isinstance(one, Settled)]
            assert [one.is_exact for one in settled] == [True, True]
            assert len({one.digest for one in settled}) == 1
            assert {(one.p, one.missing) for one in settled} == {(0.0, 0)}
            assert all(one.chunks > 0 for one in settled)
            # A half goes out and comes back, of 400 000 bytes for each rank.
            assert settled[0].wire_bytes >= 800_000
    finally:
        # Each waits for the other's goodbye.
        for played in ranks:
            played.hang_up()
        codes = [played.end() for played in ranks]
    assert codes == [0, 0]


@pytest.mark.slow
@pytest.mark.sockets
def test_gloo_s_turn_gives_the_sum() -> None:
    """A world of one: more would need more processes."""
    rank = Played()
    try:
        there = rank.ask(Host("127.0.0.1", 20.0))
        assert rank.ask(join(0, 1, there.port, ("gloo",))) == Ready()
        assert rank.ask(Prepare(4)) == Ready()
        finished = rank.ask(Go("gloo", 0.0))
        settled = rank.ask(Settle())
    finally:
        code = rank.end()

    assert isinstance(finished, Finished)
    assert finished.latency_s > 0.0
    assert (settled.is_exact, settled.p, settled.chunks) == (True, 0.0, 0)
    assert settled.user_s + settled.system_s > 0.0
    assert code == 0


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        (b"{}\n", "Object missing required field `type`"),
        (
            msgspec.json.encode(join(0, 2, 1, ("tailbound",), device="eth77")) + b"\n",
            "there is no interface eth77 here",
        ),
    ],
)
@pytest.mark.sockets
def test_what_goes_wrong_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, orders: bytes, told: str
) -> None:
    monkeypatch.setattr("tailbound.lab.bench_rank.open_store", lambda *_: None)
    heard: list[BenchAnswer] = []

    assert follow(io.BytesIO(orders), heard.append) == 1

    (broken,) = heard
    assert isinstance(broken, Broken)
    assert broken.message.startswith(told)
    assert "\n" not in broken.message


def test_without_orders_it_ends_in_good_order() -> None:
    heard: list[BenchAnswer] = []

    assert follow(io.BytesIO(), heard.append) == 0

    assert heard == []


def all_of(ranks: list[Played]) -> list[BenchAnswer]:
    """The next answer of each."""
    return [played.answers.get(timeout=20.0) for played in ranks]

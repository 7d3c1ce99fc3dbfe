"""The benchmark's ranks as a team; actors play them (``bench_actor.py``)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailbound.config import LossBound
from tailbound.errors import TailboundError
from tailbound.lab.bench_orders import Finished, Go, Prepare, Settle, Settled
from tailbound.lab.bench_team import Team
from tailbound.lab.orders import Ready

pytestmark = pytest.mark.processes

ACTOR = str(Path(__file__).with_name("bench_actor.py"))


@pytest.fixture
def team() -> Iterator[Team]:
    with Team(3, timeout_s=0.5) as made:
        yield made
        # As after an error: the silent ones are not waited for.
        made.__exit__(KeyError, KeyError(), None)


def join(team: Team, part: str) -> None:
    team.start([sys.executable, ACTOR, part], None)
    team.join(
        num_elements=10,
        sides=("tailbound", "gloo"),
        plan="sharded",
        bound=LossBound(),
        seed=0,
    )


def test_answers_come_in_rank_order(team: Team) -> None:
    join(team, "good")

    assert team.ask(Prepare(0), Ready) == [Ready()] * 3
    assert team.ask(Go("gloo", 0.0), Finished) == [
        Finished(0.020),
        Finished(0.030),
        Finished(0.040),
    ]
    assert [one.p for one in team.ask(Settle(), Settled)] == [0.0] * 3


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("broken", "rank 1: lost rank 0 during an all-reduce"),
        ("dead", r"rank 1 was killed by signal 9 \(SIGKILL\)"),
        ("confused", "rank 1 answered Ready.* to an order"),
        ("silent", "^rank 1 said nothing for 2 s; is this machine overloaded"),
    ],
)
@pytest.mark.slow
def test_who_fails_is_named(team: Team, part: str, told: str) -> None:
    join(team, part)

    with pytest.raises(TailboundError, match=told):
        team.ask(Go("tailbound", 0.0), Finished)


def test_who_does_not_join_is_named_with_its_last_words(team: Team) -> None:
    with pytest.raises(TailboundError) as caught:
        join(team, "absent")

    assert str(caught.value) == "rank 1 ended with exit code 1: no interface eth0"

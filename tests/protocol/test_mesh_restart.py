"""What a mesh carries over a restart, and what of the last attempt it lets in."""

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import ConfigError
from tailbound.impairments import Impairments
from tailbound.protocol.events import Direction, Event, Reduced, RoundKey, Started
from tailbound.protocol.mesh import MeshEndpoint
from tailbound.protocol.wire import make_header
from tailbound.testing import fake_mesh
from tailbound.testing.fake_mesh import FakeMesh

BOUND = LossBound(p_low=0.0, p_high=0.5, frequency=2)


def reduce_steps(mesh: FakeMesh, norms: list[float], first: int) -> list[float]:
    """One gradient of one element in each step; the loss bound of each."""
    bounds = []
    for step, norm in enumerate(norms, first):
        values_WN = [np.full(1, norm, np.float32) for _ in mesh.ranks]
        bounds.append(
            {
                reduced.p
                for reduced in mesh.all_reduce(
                    values_WN, [1.0] * len(mesh.ranks), step=step
                )
            }
        )
    assert all(len(one) == 1 for one in bounds)
    return [one.pop() for one in bounds]


def test_a_loaded_regime_holds_from_the_first_step() -> None:
    first = FakeMesh(3, BOUND)
    first.start()
    before = reduce_steps(first, [1.0, 1.0, 1.0], 1)
    state = first.ranks[2].ledger.state_dict()

    second = FakeMesh(2, BOUND)
    second.start()
    for endpoint in second.ranks:
        endpoint.ledger.load_state_dict(state)
    after = reduce_steps(second, [9.0, 9.0, 9.0], 1)

    assert before == [0.0, 0.0, 0.5]
    # The check is due with the fourth norm of all, and compares it with the third.
    assert after == [0.5, 0.0, 0.0]


def test_a_regime_is_not_loaded_within_a_step() -> None:
    mesh = FakeMesh(2, BOUND)
    mesh.start()
    state = mesh.ranks[0].ledger.state_dict()
    mesh.begin([np.ones(4, np.float32)] * 2, [1.0, 1.0], ranks=[0])

    with pytest.raises(ConfigError, match="loaded between steps, not within one"):
        mesh.ranks[0].ledger.load_state_dict(state)


def test_datagrams_of_the_attempt_before_are_counted_and_not_taken_in() -> None:
    """They come from the right address, and name a round that is open now."""
    mesh = FakeMesh(2, BOUND, seed=7)
    mesh.start()
    grad_WN = [np.full(2000, 1.0 + rank, np.float32) for rank in range(2)]
    mesh.begin(grad_WN, [1.0, 1.0], ranks=[0])
    header = make_header(RoundKey(1, 0, Direction.IN), 4711, 1)
    header["length"] = 1448
    old = header.tobytes() + np.full(362, np.nan, np.float32).tobytes()

    mesh.ranks[0].receive_datagrams(1, memoryview(old), len(old), len(old), mesh.now)
    mesh.begin(grad_WN, [1.0, 1.0], ranks=[1])
    mesh.run_until(Reduced)

    assert grad_WN[0].tolist() == [1.5] * 2000
    assert mesh.ranks[0].counters().foreign == 1


class Eager(MeshEndpoint):
    """Begins its first round in the moment in which it has started."""

    values_N = np.zeros(0, np.float32)

    def next_event(self) -> Event | None:
        """See Endpoint."""
        event = super().next_event()
        if isinstance(event, Started):
            self.values_N = np.full(2000, 1.0 + self.rank, np.float32)
            self.all_reduce(
                self.values_N, 1.0, 0.0, dtype="float32", step=1, is_last=True
            )
        return event


@pytest.mark.parametrize("num", [2, 3, 4])
def test_a_question_that_comes_before_the_start_is_answered_after_it(
    monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """One read brings the word that starts a rank, an announcement and a probe.

    Of the first seven seeds two or more make it so.
    """
    monkeypatch.setattr(fake_mesh, "MeshEndpoint", Eager)
    for seed in range(7):
        mesh = FakeMesh(
            num,
            LossBound.fixed(0.0),
            seed=seed,
            impairments=Impairments(jitter_s=0.01),
            timeout_s=20.0,
            silence_s=5.0,
        )

        mesh.run_until(Reduced)

        for endpoint in mesh.ranks:
            assert isinstance(endpoint, Eager)
            assert endpoint.values_N.tolist() == [(num + 1) / 2] * 2000, seed

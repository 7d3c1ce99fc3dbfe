"""Several steps of a mesh under way at once, over links that lose most of them."""

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.protocol.events import Reduced
from tailbound.testing import FakeMesh


@pytest.mark.parametrize("seed", range(8))
def test_a_round_does_not_end_before_its_steps_bound_is_decided(seed: int) -> None:
    """A rank may have the mean of one owner and wait for another's of the step before.

    A bucket of one chunk has one owner only.
    """
    net = FakeMesh(
        3,
        LossBound.fixed(0.3),
        impairments=Impairments(losses=(IndependentLoss(rate=0.7),), delay_s=0.002),
        seed=seed,
    )
    net.start()
    for step in (1, 2, 3):
        for slot in (0, 1):
            grad_WN = [np.full(10, rank, np.float32) for rank in range(3)]
            net.begin(grad_WN, [1.0] * 3, step=step, is_last=slot == 1)

    events = [event for _ in range(6) for event in net.run_until(Reduced)]

    assert [event.p for event in events] == [0.3] * 18
    # Rounds end on each rank in the order of its calls, step by step.
    by_rank = [[event.counter for event in events[rank::3]] for rank in range(3)]
    for counters in by_rank:
        assert [(counter + 1) // 2 for counter in counters] == [1, 1, 2, 2, 3, 3]

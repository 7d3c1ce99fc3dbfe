"""What is common to the hook and FSDP's replicas: gradients before they travel."""

import pytest
import torch

from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError
from tailbound.training.mesh_steps import check_gradient, check_settings, multiply

HALF = torch.full((2,), 40000.0, dtype=torch.float16)


def test_a_float16_gradient_may_be_multiplied_by_one_and_by_no_more() -> None:
    check_gradient(HALF, 1.0)

    with pytest.raises(ConfigError, match="divide the weights of all ranks by one"):
        check_gradient(HALF, 1.001)


def test_a_wider_gradient_may_be_multiplied_by_more() -> None:
    check_gradient(HALF.bfloat16(), 4096.0)
    check_gradient(HALF.float(), 4096.0)


def test_a_weight_of_0_leaves_zeros_of_what_is_not_finite_too() -> None:
    """The mean over no samples is NaN."""
    gradient = torch.tensor([float("nan"), float("inf"), 2.0])

    multiply(gradient, 0.0)

    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_settings_without_a_loss_bound_or_a_mesh_are_refused() -> None:
    assert check_settings(LossBound(), None) == Transport()

    with pytest.raises(ConfigError, match=r"network is a tailbound\.LossBound, not No"):
        check_settings(None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reduced without a server"):
        check_settings(LossBound(), Transport(plan="server"))


def test_a_lossy_way_back_is_refused_where_replicas_must_not_differ() -> None:
    with pytest.raises(ConfigError, match=r"p_back=0\.1 lets replicas differ"):
        check_settings(LossBound(p_back=0.1), None)

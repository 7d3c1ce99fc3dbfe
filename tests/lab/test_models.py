"""Shapes, sizes and the one property that a model must not lose."""

import pytest
import torch
from torch import nn

from tailbound.lab.models import CharGPT, digits_cnn, resnet


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "input_shape", "expected"),
    [
        # 160 + 32 + 4640 + 64 + 65664 + 1290
        (digits_cnn(), (2, 1, 8, 8), 138794),
        # 269 722 of the paper's ResNet-20, and 16 x 32 + 32 x 64 of its shortcuts
        (
            resnet(dims=2, in_channels=3, widths=(16, 32, 64), blocks_per_width=3),
            (2, 3, 32, 32),
            272282,
        ),
        # stem 120, stages 3552 + 11712 + 46464, last layer 970
        (
            resnet(dims=1, in_channels=1, widths=(24, 48, 96), blocks_per_width=1),
            (2, 1, 40),
            62818,
        ),
    ],
    ids=["digits_cnn", "resnet20", "mnist1d_resnet"],
)
def test_a_classifier_gives_ten_logits_a_sample(
    model: nn.Module, input_shape: tuple[int, ...], expected: int
) -> None:
    assert model(torch.zeros(input_shape)).shape == (2, 10)
    assert num_parameters(model) == expected


def test_no_model_has_state_that_training_leaves_behind_besides_parameters() -> None:
    """Running statistics would differ from worker to worker."""
    for model in (
        digits_cnn(),
        resnet(dims=2, in_channels=3, widths=(16, 32), blocks_per_width=1),
        CharGPT(context=8),
    ):
        assert list(model.buffers()) == []


def test_the_character_model_gives_a_logit_for_each_byte_at_each_place() -> None:
    """256 x 64 + 64 x 64, two blocks of 49984, and 128 of the last norm."""
    model = CharGPT(context=64)

    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)
    assert num_parameters(model) == 120576


def test_no_place_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = CharGPT(context=6)
    tokens = torch.tensor([[10, 20, 30, 40, 50, 60]])
    changed = torch.tensor([[10, 20, 30, 99, 50, 60]])

    before, after = model(tokens), model(changed)

    change_T = (before - after).abs().amax(dim=(0, 2))
    assert change_T[:3].max() < 1e-6
    assert change_T[3:].min() > 1e-4

"""The digest tells models apart bit by bit, and only then."""

import torch
from torch import nn

from tailbound.lab.digest import parameter_digest


def linear(*weights: float) -> nn.Module:
    model = nn.Linear(len(weights), 1, bias=False)
    model.weight.data = torch.tensor([weights])
    return model


def test_the_digest_is_the_sha256_of_names_dtypes_shapes_and_bytes() -> None:
    """From sha256sum, given "weight torch.float32 (1, 2)", a new line, 1.0 and -2.0."""
    assert parameter_digest(linear(1.0, -2.0)) == "43dda83950672ea6"


def test_minus_zero_differs_from_zero() -> None:
    assert parameter_digest(linear(0.0)) != parameter_digest(linear(-0.0))


def test_the_same_bytes_in_another_shape_differ() -> None:
    upright = nn.Linear(1, 2, bias=False)
    upright.weight.data = torch.tensor([[1.0], [2.0]])

    assert parameter_digest(upright) != parameter_digest(linear(1.0, 2.0))


def test_buffers_count_and_a_scalar_one_too() -> None:
    model = nn.BatchNorm1d(3)
    before = parameter_digest(model)

    assert model.num_batches_tracked is not None
    model.num_batches_tracked += 1

    assert parameter_digest(model) != before


def test_numbers_that_numpy_does_not_have_are_hashed() -> None:
    model = linear(1.0, 2.0).bfloat16()

    assert parameter_digest(model) == parameter_digest(linear(1.0, 2.0).bfloat16())
    assert parameter_digest(model) != parameter_digest(linear(1.0, 2.0))


def test_the_memory_layout_does_not_count() -> None:
    flat = nn.Linear(3, 2, bias=False)
    turned = nn.Linear(3, 2, bias=False)
    turned.weight.data = flat.weight.detach().t().contiguous().t()

    assert parameter_digest(turned) == parameter_digest(flat)

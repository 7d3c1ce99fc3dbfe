"""Split a step's batch into micro-batches, in the form that the loader gave it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tailbound.errors import ConfigError


def split_batch(batch: Any, num: int) -> list[Any]:
    """Cut a batch along its first axis into parts as equal as can be; views.

    Args:
        batch: a tensor, or a tuple, named tuple, list or mapping of tensors of equal
            length. A mapping's parts are dicts, the others' are of its own type.
        num: how many, 1 or more. Fewer samples than that give one part a sample, and
            none give none.

    Raises:
        ConfigError: something else, or lengths differ.
    """
    tensors = _tensors(batch)
    sizes = sorted({len(tensor) for tensor in tensors})
    if len(sizes) != 1:
        raise ConfigError(
            "a batch's tensors have one length on the first axis, "
            + (
                f"not lengths {', '.join(map(str, sizes))}"
                if sizes
                else "here are none"
            )
        )
    num = min(num, sizes[0])
    if num == 0:
        return []
    parts = zip(*(tensor.tensor_split(num) for tensor in tensors), strict=True)
    return [_rebuild(batch, part) for part in parts]


def num_samples(batch: Any) -> int:
    """Samples of a batch or a micro-batch that ``split_batch`` takes or gives."""
    return len(_tensors(batch)[0])


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        tensors = [batch]
    elif isinstance(batch, Mapping):
        tensors = list(batch.values())
    elif isinstance(batch, tuple | list):
        tensors = list(batch)
    else:
        raise ConfigError(
            "a batch is a tensor, or a tuple, list or dict of tensors, not a "
            f"{type(batch).__name__}"
        )
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"a batch holds tensors, not a {type(tensor).__name__}")
        if tensor.dim() == 0:
            raise ConfigError("a batch's tensors have a first axis; this one is 0-d")
    return tensors


def _rebuild(batch: Any, part: tuple[Tensor, ...]) -> Any:
    if isinstance(batch, Tensor):
        return part[0]
    if isinstance(batch, Mapping):
        return dict(zip(batch, part, strict=True))
    if hasattr(batch, "_fields"):  # a named tuple takes its fields one by one
        return type(batch)(*part)
    return type(batch)(part)

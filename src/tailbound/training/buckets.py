"""A model's gradients as flat buckets, one per dtype, and its state as bytes."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailbound.errors import ConfigError, HandshakeError, TailboundError
from tailbound.protocol.messages import BucketSpec
from tailbound.training.exchange import AllGather

NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Dtypes that travel, and their names on the wire."""


class FlatBucket:
    """All trainable parameters of one dtype, their gradients in one CPU tensor."""

    def __init__(
        self, dtype: torch.dtype, named: list[tuple[str, nn.Parameter]]
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.spec = BucketSpec(
            NAMES[dtype],
            tuple(name for name, _ in named),
            tuple(tuple(parameter.shape) for parameter in self.parameters),
        )
        self.flat = torch.zeros(self.spec.num_elements, dtype=dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._slices: tuple[Tensor, ...] = torch.split(self.flat, sizes)

    @property
    def values_N(self) -> NDArray[Any]:
        """The bucket's memory; bfloat16, which NumPy lacks, as uint16."""
        if self.flat.dtype is torch.bfloat16:
            return self.flat.view(torch.uint16).numpy()
        return self.flat.numpy()

    def pull(self) -> None:
        """Copy the gradients into the bucket; a parameter without one counts as 0."""
        for parameter, place in zip(self.parameters, self._slices, strict=True):
            grad = parameter.grad
            if grad is None:
                place.zero_()
            elif grad.is_sparse:
                raise ConfigError(
                    "sparse gradients are not supported; build the embedding with "
                    "sparse=False"
                )
            else:
                place.copy_(grad.reshape(-1))

    def push(self) -> None:
        """Copy the bucket back into the gradients.

        A parameter that had none gets one: whether another rank used it is not known
        here, and all replicas must step alike.
        """
        for parameter, place in zip(self.parameters, self._slices, strict=True):
            mean = place.view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.device, copy=True)
            else:
                parameter.grad.copy_(mean)

    @torch.no_grad()
    def pull_parameters(self) -> None:
        """Copy the parameters themselves into the bucket; between steps."""
        for parameter, place in zip(self.parameters, self._slices, strict=True):
            place.copy_(parameter.reshape(-1))

    @torch.no_grad()
    def push_parameters(self) -> None:
        """Copy the bucket into the parameters."""
        for parameter, place in zip(self.parameters, self._slices, strict=True):
            parameter.copy_(place.view(parameter.shape))


def make_buckets(model: nn.Module) -> list[FlatBucket]:
    """One bucket for each dtype among the trainable parameters, in name order.

    Raises:
        ConfigError: there is nothing to train, or a dtype does not travel.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        if parameter.dtype not in NAMES:
            allowed = ", ".join(NAMES.values())
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; gradients of {allowed} travel"
            )
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    if not by_dtype:
        raise ConfigError("the model has no trainable parameter (requires_grad=True)")
    dtypes = sorted(by_dtype, key=lambda dtype: NAMES[dtype])
    return [FlatBucket(dtype, by_dtype[dtype]) for dtype in dtypes]


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    yield from model.named_buffers()


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def state_bytes(model: nn.Module) -> bytes:
    """All parameters and buffers back to back, bit for bit."""
    return b"".join(_raw(tensor) for _, tensor in _state(model))


def load_state_bytes(model: nn.Module, data: bytes) -> None:
    """Set all parameters and buffers from another replica's ``state_bytes``.

    Raises:
        ConfigError: the other model's state has another size.
    """
    _load([tensor for _, tensor in _state(model)], data, "parameters and buffers")


def buffer_bytes(model: nn.Module) -> bytes:
    """All buffers back to back, bit for bit."""
    return b"".join(_raw(tensor) for tensor in model.buffers())


def load_buffer_bytes(model: nn.Module, data: bytes) -> None:
    """Set all buffers from another replica's ``buffer_bytes``.

    Raises:
        ConfigError: the other model's buffers have another size.
    """
    _load(list(model.buffers()), data, "buffers")


def _load(tensors: list[Tensor], data: bytes, what: str) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(sizes) != len(data):
        raise ConfigError(
            f"{what} are {sum(sizes)} bytes here and {len(data)} bytes on rank 0; "
            "build the same model on every rank"
        )
    start = 0
    with torch.no_grad():
        for tensor, size in zip(tensors, sizes, strict=True):
            if size:
                raw = np.frombuffer(data, np.uint8, size, start).copy()
                values = torch.from_numpy(raw).view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))
            start += size


def equalise(model: nn.Module, all_gather: AllGather, rank: int) -> None:
    """Set parameters and buffers to rank 0's, on every rank.

    Args:
        model: of the same build on every rank.
        all_gather: exchanges bytes with all ranks; one per rank comes back.
        rank: this process.

    Raises:
        HandshakeError: names, shapes or dtypes differ; on every rank alike.
    """
    layout = [
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in _state(model)
    ]
    state = state_bytes(model) if rank == 0 else b""
    parts = all_gather("\n".join(layout).encode() + b"\0" + state)
    layouts = [part.partition(b"\0")[0].decode().split("\n") for part in parts]
    for other, theirs in enumerate(layouts):
        for first, here in zip_longest(layouts[0], theirs, fillvalue="nothing"):
            if first != here:
                raise HandshakeError(
                    "the model's state",
                    f"{first} (rank 0)",
                    f"{here} (rank {other})",
                    "build the same model on every rank",
                )
    if rank != 0:
        start = parts[0].index(b"\0") + 1
        load_state_bytes(model, parts[0][start:])


def parameter_digest(model: nn.Module) -> str:
    """A short hex digest of all parameters, bit exact: equal replicas, equal digest."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(_raw(parameter))
    return digest.hexdigest()[:16]


def compare_digests(digests: Sequence[bytes], step: int) -> None:
    """See to it that all replicas are equal.

    Args:
        digests: every rank's ``parameter_digest``, in rank order.
        step: after which they were taken, for the message.

    Raises:
        TailboundError: they differ; names the ranks and their digests.
    """
    if len(set(digests)) > 1:
        shown = ", ".join(f"rank {r}: {d.decode()}" for r, d in enumerate(digests))
        raise TailboundError(
            f"replicas differ after step {step} ({shown}); does something other than "
            "job.step() change parameters?"
        )

"""A fingerprint of a model's state, to see that replicas are equal bit for bit."""

import hashlib

import torch
from torch import Tensor, nn


def parameter_digest(model: nn.Module) -> str:
    """Hash every parameter and buffer: name, dtype, shape and bytes.

    Bit exact: 0.0 and -0.0 differ. A tensor that two names share counts once.

    Returns:
        the first 16 hex digits of a SHA-256.
    """
    sha = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(raw_bytes(tensor))
    return sha.hexdigest()[:16]


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the elements' bytes in row-major order, whatever the dtype."""
    # NumPy has no bfloat16, and a 0-d tensor cannot change its element size.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()

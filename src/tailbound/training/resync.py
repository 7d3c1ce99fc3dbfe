"""Make replicas equal again that a lossy way back let drift apart.

Of each parameter the owner's value is taken: the rank that reduces an element misses
nothing of its mean, so with the owners' values no update is lost.

Source: docs/design/0033.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tailbound.transport.mesh import MeshGroup


def resync(mesh: MeshGroup, flats: Sequence[Tensor], dtypes: Sequence[str]) -> float:
    """Take every element from its owner; all ranks call it together.

    Args:
        mesh: the job's; no all-reduce is under way.
        flats: the parameters, flat and in CPU memory, one tensor for each bucket in
            the order of the all-reduces. Overwritten.
        dtypes: the buckets' wire formats.

    Returns:
        How far this rank was from the owners: the L2 norm of the difference over that
        of the owners' parameters; inf or NaN where one of the two was not finite.

    Raises:
        TailboundError: the exchange failed; the job is over.
    """
    cuts = [
        mesh.shards(len(flat), dtype, slot)
        for slot, (flat, dtype) in enumerate(zip(flats, dtypes, strict=True))
    ]
    own = [
        flat[cut[mesh.rank]].view(torch.uint8).numpy().tobytes()
        for flat, cut in zip(flats, cuts, strict=True)
    ]
    parts = [memoryview(part) for part in mesh.all_gather(b"".join(own))]
    mesh.forget_owed()
    square = apart = 0.0
    for flat, cut in zip(flats, cuts, strict=True):
        for owner, place in enumerate(cut):
            ours = flat[place]
            size = ours.numel() * ours.element_size()
            if not size:
                continue
            raw_B = np.frombuffer(parts[owner][:size], np.uint8).copy()
            parts[owner] = parts[owner][size:]
            theirs = torch.from_numpy(raw_B).view(flat.dtype)
            square += _square(theirs)
            apart += _square(theirs.double() - ours.double())
            ours.copy_(theirs)
    return math.sqrt(apart / square) if square else math.sqrt(apart)


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2

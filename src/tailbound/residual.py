"""What of a gradient was lost, kept by its sender and added to its next gradient.

The sender's final bitmap says which chunks were given up. With ``holes="residual"``
they are not gone: they travel again, inside the next gradient of the same bucket.

With momentum correction the sender keeps a velocity of its own and sends that instead
of the gradient, so that what comes late has the momentum it would have had in time::

    velocity = momentum * velocity + gradient
    carried  = carried + velocity          this is sent
    carried  = 0 where it arrived

The optimizer must then have no momentum: with nothing lost, the two lines above and a
plain step are SGD with momentum. The velocity itself is not masked (the paper's
"momentum factor masking"), since nearly everything arrives here: masked, a bound of
0.8 % would be SGD without momentum (docs/design/0026).

Axes: N elements of a bucket, C chunks, E elements of a chunk, K lost chunks.
Source: Seide et al. 2014 (the residual); Lin et al. 2018 (arXiv:1712.01887), section 3.
"""

from collections.abc import Hashable
from typing import Self

import numpy as np

from tailbound.config import LossBound
from tailbound.errors import ConfigError, ShapeError
from tailbound.reduction import (
    BLOCK_ELEMENTS,
    Mask,
    Values,
    WireFormat,
    narrow,
    widen,
)


class Residual:
    """What one sender still owes of one bucket.

    It lives in memory only: a restart begins with nothing carried.
    """

    def __init__(
        self,
        num_elements: int,
        elements_per_chunk: int,
        wire_format: WireFormat,
        *,
        momentum: float = 0.0,
    ) -> None:
        """Owe nothing.

        Args:
            num_elements: N, 1 or more.
            elements_per_chunk: E, 1 or more; the last chunk may be short.
            wire_format: of the gradients; carried in its ``sum`` dtype.
            momentum: in [0, 1); above 0 the velocity travels, see the module.

        Raises:
            ShapeError: N or E is not positive.
            ConfigError: the momentum is out of range.
        """
        if num_elements < 1 or elements_per_chunk < 1:
            raise ShapeError(
                "a residual has 1 or more elements in chunks of 1 or more, "
                f"not {num_elements} in chunks of {elements_per_chunk}"
            )
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum is in [0, 1), not {momentum}")
        self.shape = (num_elements, elements_per_chunk, wire_format)
        """N, E and the format: a bucket that differs in one has another residual."""
        self.is_out = False
        """True from ``apply`` until ``note``."""
        self.dropped = 0
        """Chunks that were lost and not carried: they held NaN or inf."""
        self._format, self._momentum = wire_format, momentum
        # Whole chunks, so that they are rows; what pads the last one stays 0.
        rows = -(-num_elements // elements_per_chunk)
        self._carried_CE = np.zeros((rows, elements_per_chunk), wire_format.sum)
        self._velocity_CE = np.zeros_like(self._carried_CE) if momentum else None

    # As a decorator errstate costs half of what the with statement costs here.
    @np.errstate(over="ignore", invalid="ignore")
    def apply(self, values_N: Values, *, loss_scale: float = 1.0) -> None:
        """Add to a gradient what earlier ones lost, in place, and remember the sum.

        A copy is kept because the mean may overwrite the gradient before the final
        bitmap is known.

        Args:
            values_N: the gradient, in the wire dtype, multiplied by weight and scale.
            loss_scale: factor that it carries; what is carried is kept without it,
                since the next gradient may have another.

        Raises:
            ShapeError: it is not the bucket.
            ConfigError: the gradient before it is still on its way.
        """
        num_elements, _, _ = self.shape
        if self.is_out:
            raise ConfigError(
                "holes='residual' needs the end of a step before the next one begins: "
                "what the bucket lost is not known yet"
            )
        if values_N.shape != (num_elements,) or values_N.dtype != self._format.wire:
            raise ShapeError(
                f"the bucket is {num_elements} {self._format.wire}, "
                f"not {values_N.shape} {values_N.dtype}"
            )
        self.is_out = True
        carried_N = self._carried_CE.reshape(-1)
        scale = self._format.sum.type(loss_scale)
        for start in range(0, num_elements, BLOCK_ELEMENTS):
            part = slice(start, min(start + BLOCK_ELEMENTS, num_elements))
            new = widen(values_N[part], self._format)
            if loss_scale != 1.0:
                new = new / scale
            if self._velocity_CE is not None:
                velocity = self._velocity_CE.reshape(-1)[part]
                velocity *= self._format.sum.type(self._momentum)
                velocity += new
                new = velocity
            total = carried_N[part]
            total += new
            if loss_scale != 1.0:
                total = total * scale
            values_N[part] = narrow(total, self._format)

    def note(self, arrived_C: Mask | None) -> None:
        """Learn from the final bitmap what arrived; what did not is carried.

        None: all of it did.

        A lost chunk with NaN or inf is dropped and counted: carried, it would spoil
        every gradient until it arrived, long after its cause was gone.

        Raises:
            ShapeError: the bitmap is not the bucket's.
        """
        if arrived_C is None:
            arrived_C = np.ones(len(self._carried_CE), np.bool_)
        if arrived_C.shape != self._carried_CE.shape[:1]:
            raise ShapeError(
                f"the bucket has {len(self._carried_CE)} chunks, "
                f"the bitmap {arrived_C.shape}"
            )
        self.is_out = False
        self._carried_CE[arrived_C] = 0.0
        (lost_K,) = np.nonzero(~arrived_C)
        spoiled_K = lost_K[~np.isfinite(self._carried_CE[lost_K]).all(axis=1)]
        self._carried_CE[spoiled_K] = 0.0
        self.dropped += len(spoiled_K)
        if self._velocity_CE is not None:
            # Of all chunks: what arrived stays in the velocity for many steps, too.
            self._velocity_CE[~np.isfinite(self._velocity_CE).all(axis=1)] = 0.0


class Residuals:
    """The residuals of one sender, by what it sends; all begin empty."""

    def __init__(self, *, momentum: float = 0.0) -> None:
        self._momentum = momentum
        self._by_key: dict[Hashable, Residual] = {}

    @classmethod
    def for_bound(cls, bound: LossBound) -> Self | None:
        """A sender's residuals, if the bound's holes have any."""
        if bound.holes != "residual":
            return None
        return cls(momentum=bound.residual_momentum)

    def of(
        self,
        key: Hashable,
        num_elements: int,
        elements_per_chunk: int,
        wire_format: WireFormat,
    ) -> Residual:
        """The residual under this key; a new one if the bucket has changed.

        What was owed of a bucket with another shape is forgotten: its elements belong
        to other parameters (DDP rebuilds its buckets after the first step).
        """
        residual = self._by_key.get(key)
        shape = (num_elements, elements_per_chunk, wire_format)
        if residual is None or residual.shape != shape:
            residual = Residual(*shape, momentum=self._momentum)
            self._by_key[key] = residual
        return residual

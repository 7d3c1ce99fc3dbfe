"""The sum of one rank's shard, which may start before its own gradient is there."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.protocol.shards import Shard
from tailbound.protocol.sinks import SumSink
from tailbound.reduction import Values, WireFormat, add_into, finish_mean, widen


class ShardSum:
    """Adds up what comes for a shard, in the gradient's own memory where that goes.

    A peer that is ahead sends before this rank has a gradient: its chunks then go into
    memory of their own, which the gradient takes over when it comes.
    """

    def __init__(self, shard: Shard, wire_format: WireFormat) -> None:
        self._shard, self._format = shard, wire_format
        self._place_E: NDArray[Any] | None = None
        self._sum_E: Values | None = None
        self._sink: SumSink | None = None

    @property
    def sink(self) -> SumSink:
        """Where chunks of the shard go now; changes with ``put_own``."""
        if self._sink is None:
            self._sum_E = np.empty(self._shard.layout.num_elements, self._format.sum)
            self._sink = SumSink(self._sum_E, self._shard.layout, self._format)
        return self._sink

    def put_own(self, values_N: NDArray[Any], weight: float) -> None:
        """This rank's gradient is there; with a weight of 0 only its memory counts.

        Args:
            values_N: the whole bucket, already multiplied by the weight.
            weight: what is behind it.
        """
        place_E = self._place_E = values_N[self._shard.first : self._shard.stop]
        early_E, early = self._sum_E, self._sink
        if early is not None:
            early.fill_holes()
        is_own_format = self._format.wire == self._format.sum
        sum_E = place_E if is_own_format else early_E
        if sum_E is None:
            sum_E = np.empty(len(place_E), self._format.sum)
        if weight and early_E is not None:
            if is_own_format:
                add_into(place_E, early_E, self._format)
            else:
                add_into(early_E, place_E, self._format)
        elif weight and not is_own_format:
            sum_E[...] = widen(place_E, self._format)
        elif early_E is not None and is_own_format:
            place_E[...] = early_E
        self._sum_E = sum_E
        self._sink = SumSink(
            sum_E,
            self._shard.layout,
            self._format,
            is_empty=not weight and early_E is None,
        )

    def finish(
        self, total_weight: float, weight_C: NDArray[np.float64] | None
    ) -> NDArray[Any]:
        """Put the mean into the gradient's memory.

        Args:
            total_weight: behind the sum, > 0.
            weight_C: the weight that arrived of each chunk; None: holes count as zero.

        Returns:
            The mean, in the wire dtype: this shard's part of the bucket.
        """
        assert self._place_E is not None  # put_own came first
        assert self._sum_E is not None
        self.sink.fill_holes()
        return finish_mean(
            self._sum_E,
            total_weight,
            self._format,
            weight_C=weight_C,
            elements_per_chunk=self._shard.layout.elements_per_chunk,
            out=self._place_E,
        )

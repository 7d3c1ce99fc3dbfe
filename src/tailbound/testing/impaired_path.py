"""What a bad network does to one receiving path (spec N10).

The fake network and the real driver hold back arriving datagrams and control bytes in
the same object, so a loss model means the same in a test and in a demo.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tailbound.impairments import DelayLine, ImpairedLink, Impairments
from tailbound.protocol.wire import HEADER, HEADER_BYTES


class Batch(NamedTuple):
    """Datagrams back to back, the last possibly shorter."""

    data: memoryview
    num_bytes: int
    segment_bytes: int


class ImpairedPath:
    """Drops, doubles, delays and reorders what arrives on one link."""

    def __init__(self, impairments: Impairments, rng: np.random.Generator) -> None:
        self._impairments = impairments
        self._link = ImpairedLink(impairments, rng)
        self._datagrams: DelayLine[Batch] = DelayLine()
        self._control: DelayLine[bytes] = DelayLine()
        self._last_control_s = 0.0
        self.dropped = 0
        """Datagrams that the loss models took."""

    def push_datagrams(self, batch: Batch, now: float) -> None:
        """Take in a batch; its memory may be reused afterwards."""
        num, rest = divmod(batch.num_bytes, batch.segment_bytes)
        if num:
            self._push_equal(batch.data, num, batch.segment_bytes, now)
        if rest:
            self._push_equal(batch.data[num * batch.segment_bytes :], 1, rest, now)

    def push_control(self, data: bytes, now: float) -> None:
        """Take in bytes of the control stream; they stay in order."""
        due_s = max(self._last_control_s, now + self._link.control_delay_s())
        self._last_control_s = due_s
        self._control.push(due_s, data)

    def pop_datagrams(self, now: float) -> list[Batch]:
        """Batches that are due; hand them on before the control bytes."""
        batches = self._datagrams.pop_due(now)
        if self._impairments.has_constant_delay or len(batches) < 2:
            return batches
        return list(_joined(batches))

    def pop_control(self, now: float) -> list[bytes]:
        """Control bytes that are due."""
        return self._control.pop_due(now)

    @property
    def holds_control(self) -> bool:
        """True while control bytes wait for their time."""
        return len(self._control) > 0

    def next_due_s(self) -> float | None:
        """When something is due next."""
        datagrams_s, control_s = (
            self._datagrams.next_due_s(),
            self._control.next_due_s(),
        )
        if datagrams_s is None or control_s is None:
            return control_s if datagrams_s is None else datagrams_s
        return min(datagrams_s, control_s)

    def _push_equal(
        self, data: memoryview, num: int, segment_bytes: int, now: float
    ) -> None:
        counter_K = np.zeros(num, dtype=np.int64)
        if segment_bytes >= HEADER_BYTES:
            headers_K = np.ndarray((num,), HEADER, data, 0, (segment_bytes,))
            counter_K = headers_K["counter"].astype(np.int64)
        keep_K = self._link.keep(counter_K)
        self.dropped += num - int(np.count_nonzero(keep_K))
        raw = np.frombuffer(data, np.uint8, num * segment_bytes)
        rows_KB = raw.reshape(num, segment_bytes)[keep_K]
        num = len(rows_KB)
        if not num:
            return
        if self._impairments.duplicate_share:
            rows_KB = np.repeat(rows_KB, self._link.copies(num), axis=0)
            num = len(rows_KB)
        if self._impairments.has_constant_delay:
            flat = rows_KB.reshape(-1).data
            batch = Batch(flat, num * segment_bytes, segment_bytes)
            self._datagrams.push(now + self._impairments.delay_s, batch)
            return
        delay_K = self._link.delay_s(num).tolist()
        for row_B, delay_s in zip(rows_KB, delay_K, strict=True):
            batch = Batch(row_B.data, segment_bytes, segment_bytes)
            self._datagrams.push(now + delay_s, batch)


def _joined(batches: list[Batch]) -> Iterator[Batch]:
    """Join neighbours of one size: a batch costs the receiver as much as a datagram."""
    for size, group in itertools.groupby(batches, lambda batch: batch.segment_bytes):
        data = b"".join(batch.data for batch in group)
        yield Batch(memoryview(data), len(data), size)

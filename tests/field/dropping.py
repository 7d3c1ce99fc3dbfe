"""A UDP socket that loses what the test names, and notes what left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tailbound.protocol.wire import HEADER, HEADER_BYTES, PING
from tailbound.transport import links
from tailbound.transport.addresses import Address
from tailbound.transport.udp import Buffer, UdpSocket

Rule = Callable[[np.void, bytes], bool]
"""Given a datagram's header and data: whether it is lost."""


def holds_inf(data: bytes) -> bool:
    """Whether a chunk of float32 has an infinity."""
    return bool(np.isinf(np.frombuffer(data, "<f4")).any())


@contextmanager
def losing(rule: Rule) -> Iterator[None]:
    """Every link opened inside loses by this rule what it sends; pings pass."""

    class Loses(UdpSocket):
        def send_batch(
            self, batch: Buffer, segment_bytes: int, address: Address
        ) -> int:
            view = memoryview(batch)
            starts = range(0, len(view), segment_bytes)
            kept = [at for at in starts if not is_lost(view[at : at + segment_bytes])]
            if len(kept) == len(starts):
                return super().send_batch(batch, segment_bytes, address)
            joined = b"".join(view[at : at + segment_bytes] for at in kept)
            went = super().send_batch(joined, segment_bytes, address) if kept else 0
            number = -(-went // segment_bytes)
            return kept[number] if number < len(kept) else len(view)

    def is_lost(datagram: memoryview) -> bool:
        header = np.frombuffer(datagram, HEADER, 1)[0]
        return header["kind"] != PING and rule(header, bytes(datagram[HEADER_BYTES:]))

    names = vars(links)
    names["UdpSocket"] = Loses
    try:
        yield
    finally:
        names["UdpSocket"] = UdpSocket

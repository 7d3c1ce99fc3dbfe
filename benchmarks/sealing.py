"""What does it cost to seal datagrams, by their size and by the level?

    python benchmarks/sealing.py --out benchmarks/results/sealing.json

One process seals a batch of 64 KiB and opens it again, over and over; no network. Data
bytes count, header and trailer do not. Needs the extra ``tailbound[security]``.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path

from tailbound.lab.machine import versions
from tailbound.protocol.wire import HEADER_BYTES
from tailbound.security.sealing import (
    TRAILER_BYTES,
    Level,
    LinkKeys,
    Opener,
    Sealer,
)

BATCH_BYTES = 65507
SEGMENTS = (1472, 8972, BATCH_BYTES)
"""Datagrams on Ethernet, jumbo frames, loopback; header and trailer included."""
LEVELS: tuple[Level, ...] = ("authenticated", "encrypted")


def measure(level: Level, segment_bytes: int, mbytes: float) -> dict[str, float | str]:
    """Seal and open; gigabytes of data a second of each, and CPU of both."""

    def keys() -> LinkKeys:
        return LinkKeys(bytes(32), salt=bytes(32), sender=0, receiver=1)

    sealer = Sealer(keys(), level, header_bytes=HEADER_BYTES)
    opener = Opener(keys(), level, header_bytes=HEADER_BYTES)
    num = BATCH_BYTES // segment_bytes
    plain_bytes = segment_bytes - TRAILER_BYTES
    batch, sealed, opened = (memoryview(bytearray(BATCH_BYTES)) for _ in range(3))
    data_bytes = num * (segment_bytes - HEADER_BYTES - TRAILER_BYTES)
    seal_s = open_s = 0.0
    turns = max(1, int(1e6 * mbytes / data_bytes))
    cpu_s = time.process_time()
    batch[0] = 1
    for _ in range(turns):
        begun_s = time.perf_counter()
        size = sealer.seal(batch, num * plain_bytes, plain_bytes, sealed)
        sealed_s = time.perf_counter()
        opener.open_untrusted(sealed, size, segment_bytes, opened)
        open_s += time.perf_counter() - sealed_s
        seal_s += sealed_s - begun_s
    cpu_s = time.process_time() - cpu_s
    if opened != batch:
        raise SystemExit("a datagram did not open")
    total = turns * data_bytes
    return {
        "level": level,
        "datagram_bytes": segment_bytes,
        "seal_gb_s": round(total / seal_s / 1e9, 3),
        "open_gb_s": round(total / open_s / 1e9, 3),
        "cpu_ms_per_mb": round(1e3 * cpu_s / (total / 1e6), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=float, default=200.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [measure(level, size, args.mbytes) for size in SEGMENTS for level in LEVELS]
    for line in found:
        print(json.dumps(line))
    if args.out is not None:
        record = {
            "question": "what sealing costs, both ends together",
            "configuration": {"mbytes": args.mbytes},
            "versions": versions("cryptography"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "results": found,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Recorded traffic with one bit changed, or cut short: 10 000 pieces of each kind.

Sealed datagrams and TLS refuse them themselves. At ``security="session"`` the checksums
of UDP and TCP do, in the kernel, which is asked here with packets made by hand.
"""

import random
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from jobs import reduced, run_job, vector
from security.test_channel import pair, take
from security.test_sealing import HEADER, LEVELS, open_all, opener, seal, sealer
from tailbound.config import Security
from tailbound.security.sealing import Level
from tailbound.transport import links
from tailbound.transport.addresses import Address
from tailbound.transport.group import Group
from tailbound.transport.udp import Buffer, UdpSocket

MUTANTS = 10_000


def mutate(rng: random.Random, data: bytes | bytearray) -> bytes:
    """One bit changed, or, every tenth time, cut short."""
    if rng.random() < 0.1:
        return bytes(data[: rng.randrange(1, len(data))])
    changed = bytearray(data)
    bit = rng.randrange(8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("level", LEVELS)
def test_no_sealed_datagram_opens_once_it_was_changed(level: Level) -> None:
    rng = random.Random(2024)
    datas = [rng.randbytes(1424) for _ in range(20)]
    recorded = seal(sealer(level), *datas)
    size = len(recorded) // 20
    datagrams = [recorded[at : at + size] for at in range(0, len(recorded), size)]
    good = opener(level)

    for _ in range(MUTANTS):
        mutant = mutate(rng, rng.choice(datagrams))
        (opened,) = open_all(good, mutant, len(mutant))
        assert not any(opened), mutant.hex()

    assert open_all(good, recorded, size) == [HEADER + data for data in datas]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["authenticated", "encrypted"])
def test_nothing_is_heard_of_a_changed_control_stream(level: Security) -> None:
    """300 connections, each changed once in what its first end says."""
    rng = random.Random(7)
    word = b"gradients are done" * 3
    for _ in range(300):
        first, second = pair((level, level))
        heard = b""
        changed = False
        turn = rng.randrange(4)
        for number in range(4):
            if number == 3:
                first.send(word)
            data = take(first)
            if number == turn and data:
                mutant = mutate(rng, data)
                changed, data = True, mutant
            heard += second.feed_untrusted(data) if data else b""
            back = take(second)
            first.feed_untrusted(back) if back else None
        if changed:
            assert heard == b""
        else:
            assert heard == word


# -- the kernel's checksum --------------------------------------------------------


def may_send_raw() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP).close()
    except PermissionError:
        return False
    return True


def checksum(source: str, target: str, udp: bytes) -> int:
    """Of a UDP datagram over IPv4, its own field 0 (RFC 768)."""
    pseudo = socket.inet_aton(source) + socket.inet_aton(target)
    pseudo += struct.pack("!BBH", 0, socket.IPPROTO_UDP, len(udp))
    data = pseudo + udp + b"\0" * (len(udp) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF) or 0xFFFF


def whole_datagram(source: Address, target: Address, payload: bytes) -> bytes:
    """With its UDP header, as it is on the wire."""
    fields = (source[1], target[1], 8 + len(payload))
    udp = struct.pack("!4H", *fields, 0) + payload
    right = checksum(source[0], target[0], udp)
    return struct.pack("!4H", *fields, right) + payload


def count_of_wrong_checksums() -> int:
    names, values = (
        line.split()
        for line in Path("/proc/net/snmp").read_text().splitlines()
        if line.startswith("Udp:")
    )
    return int(values[names.index("InCsumErrors")])


@pytest.mark.slow
@pytest.mark.skipif(not may_send_raw(), reason="needs root, for a raw socket")
def test_the_kernel_takes_no_changed_datagram_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 begins each round with copies of what has been sent, each changed once.

    They have the addresses and ports of the ones they copy; the mean stays exact.
    """
    rng = random.Random(99)
    wire: list[bytes] = []

    class Recording(UdpSocket):
        def send_batch(
            self, batch: Buffer, segment_bytes: int, address: Address
        ) -> int:
            data = bytes(batch)
            if threading.current_thread().name == "tailbound-driver":
                wire.extend(
                    whole_datagram(
                        ("127.0.0.1", self.address[1]),
                        address,
                        data[at : at + segment_bytes],
                    )
                    for at in range(0, len(data), segment_bytes)
                    if segment_bytes > 1000
                )
            return super().send_batch(batch, segment_bytes, address)

    monkeypatch.setattr(links, "UdpSocket", Recording)
    rounds, num = 5, 20_000
    before = count_of_wrong_checksums()
    sent = 0

    def attack(group: Group) -> list[float]:
        nonlocal sent
        means = []
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as raw:
            for number in range(rounds):
                recorded = wire[-2 * num // 362 :] if wire else []
                for datagram in rng.choices(recorded, k=2500) if recorded else []:
                    mutant = mutate(rng, datagram)
                    if len(mutant) >= 8 and mutant[2:4] == datagram[2:4]:
                        raw.sendto(mutant, ("127.0.0.1", 0))
                        sent += len(mutant) == len(datagram)
                values = reduced(group, num, float(number))
                assert np.ptp(values) == 0.0
                means.append(float(values[0]))
        return means

    def calm(group: Group) -> list[float]:
        return [float(reduced(group, num, number + 2.0)[0]) for number in range(rounds)]

    job = run_job([attack, calm], buckets=vector(num))

    assert job.check() == 2 * [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert sent > 8000
    # A length field that grew is dropped before its checksum is looked at.
    assert count_of_wrong_checksums() - before > 0.95 * sent

"""One rank of the benchmark: ``python -m tailbound.lab.bench_rank``.

Both libraries live in the same process, with the same gradient in the same memory, and
take turns. Orders are those of ``bench_orders``.
"""

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tailbound.config import Transport
from tailbound.errors import TailboundError
from tailbound.lab.bench_orders import (
    BenchAnswer,
    Finished,
    Host,
    Join,
    Listening,
    Order,
    Prepare,
    Settle,
    Settled,
)
from tailbound.lab.child_process import die_with_parent, take_stdout
from tailbound.lab.orders import Broken, Ready
from tailbound.protocol.events import Reduced
from tailbound.protocol.messages import BucketSpec
from tailbound.training.rendezvous import mesh_over
from tailbound.transport.group import Group, Server
from tailbound.transport.mesh import MeshGroup

Say = Callable[[BenchAnswer], None]
F32 = NDArray[np.float32]

STRIDE = 7919
"""By so many elements the gradient moves from round to round: no old one is right."""
BLOCK_ELEMENTS = 1 << 16


class Gradient:
    """Gradients whose mean over all ranks is known exactly.

    Small whole numbers, rank r's r + 1 times rank 0's: every sum over ranks is exact in
    float32, in whatever order. In each round they lie elsewhere, with the same norm.

    Args:
        num: elements.
        rank: whose.
        world_size: ranks in the sum.
        seed: the same on all ranks.
    """

    def __init__(self, num: int, rank: int, world_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._whole_N = rng.integers(-8, 9, num, dtype=np.int8).astype(np.float32)
        self._factor = np.float32(rank + 1)
        self._sum_factor = np.float32(world_size * (world_size + 1) // 2)

    def fill(self, out_N: F32, number: int) -> None:
        """Write this rank's gradient of a round."""
        for part, whole in self._parts(number):
            np.multiply(whole, self._factor, out=out_N[part])

    def is_reduced(self, got_N: F32, number: int, divisor: float) -> bool:
        """Whether this is the sum of a round's gradients over ``divisor``, exactly."""
        return all(
            np.array_equal(got_N[part], whole * self._sum_factor / np.float32(divisor))
            for part, whole in self._parts(number)
        )

    def _parts(self, number: int) -> Iterator[tuple[slice, F32]]:
        num = len(self._whole_N)
        shift = number * STRIDE % num
        for first, end, moved in ((shift, num, -shift), (0, shift, num - shift)):
            for start in range(first, end, BLOCK_ELEMENTS):
                stop = min(end, start + BLOCK_ELEMENTS)
                yield slice(start + moved, stop + moved), self._whole_N[start:stop]


@dataclass(frozen=True, slots=True)
class Counters:
    """What this process and its interface have used so far."""

    user_s: float
    system_s: float
    wire_bytes: int


def read_counters(device: str) -> Counters:
    """Read the CPU time of all threads, and what the interface has sent."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    sent = parse_sent(Path("/proc/net/dev").read_text(), device)
    return Counters(usage.ru_utime, usage.ru_stime, sent)


def parse_sent(text: str, device: str) -> int:
    """Find the bytes that an interface has sent in the text of ``/proc/net/dev``."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise ValueError(f"there is no interface {device} here")


class Member:
    """This rank's membership in both jobs, and its gradient.

    Args:
        join: who we are.
        store: where the ranks meet.

    Raises:
        TailboundError, RuntimeError: the ranks do not come together.
    """

    def __init__(self, join: Join, store: Store) -> None:
        self._join = join
        self._gradient = Gradient(
            join.num_elements, join.rank, join.world_size, join.seed
        )
        self._tensor = torch.zeros(join.num_elements)
        self._values_N: F32 = self._tensor.numpy()
        self._number = 0
        self._before = self._now()
        self._reduced: Reduced | None = None
        self._group: Group | MeshGroup | None = None
        if "gloo" in join.sides:
            dist.init_process_group(
                "gloo",
                store=PrefixStore("gloo", store),
                rank=join.rank,
                world_size=join.world_size,
                timeout=timedelta(seconds=join.timeout_s),
            )
            dist.barrier()  # opens its connections
        if "tailbound" in join.sides:
            self._group = open_group(join, store)

    def prepare(self, number: int) -> None:
        """Make a round's gradient, and read the counters."""
        self._number = number
        self._gradient.fill(self._values_N, number)
        self._before = self._now()

    def reduce(self, side: str) -> None:
        """Replace the gradient by the mean (tailbound) or the sum (Gloo) over ranks."""
        self._reduced = None
        if side == "gloo":
            dist.all_reduce(self._tensor)
        else:
            assert self._group is not None
            self._reduced = self._group.all_reduce(self._values_N, 1.0)

    def settle(self) -> Settled:
        """Account for the round, once all ranks have finished it."""
        now, before, reduced = self._now(), self._before, self._reduced
        ways_in = [r for r in reduced.reports if r.direction == "in"] if reduced else []
        divisor = self._join.world_size if reduced else 1
        return Settled(
            user_s=now.user_s - before.user_s,
            system_s=now.system_s - before.system_s,
            wire_bytes=now.wire_bytes - before.wire_bytes,
            digest=hashlib.blake2b(self._values_N.data, digest_size=8).hexdigest(),
            is_exact=self._gradient.is_reduced(self._values_N, self._number, divisor),
            p=reduced.p if reduced else 0.0,
            missing=sum(report.missing for report in ways_in),
            chunks=sum(report.num_chunks for report in ways_in),
        )

    def close(self) -> None:
        """Part from the other ranks."""
        if self._group is not None:
            self._group.close()
        if "gloo" in self._join.sides:
            dist.destroy_process_group()

    def _now(self) -> Counters:
        return read_counters(self._join.device)


def open_group(join: Join, store: Store) -> Group | MeshGroup:
    """Join tailbound's job, in either plan."""
    transport = Transport(plan=join.plan, timeout_s=join.timeout_s)
    rank, world_size, bound = join.rank, join.world_size, join.bound
    if join.plan == "sharded":
        return mesh_over(store, "bench", rank, world_size, bound, transport)
    server = None
    if rank == 0:
        server = Server(world_size, host=join.host, transport=transport)
        store.set("server", server.address)
    return Group(
        store.get("server").decode(),
        rank=rank,
        world_size=world_size,
        buckets=(BucketSpec("float32", ("gradient",), ((join.num_elements,),)),),
        bound=bound,
        transport=transport,
        server=server,
    )


def open_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Find the store at a port, or open it at any if that is 0."""
    return TCPStore(
        host,
        port,
        is_master=port == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class Rank:
    """One rank: its store, if it has it, and its membership."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._member: Member | None = None

    def obey(self, order: Order) -> BenchAnswer:
        """Do what an order says; the answer."""
        if isinstance(order, Host):
            self._store = open_store(order.address, 0, order.timeout_s)
            return Listening(self._store.port)
        if isinstance(order, Join):
            port = order.store_port
            store = self._store or open_store(order.host, port, order.timeout_s)
            self._member = Member(order, store)
            return Ready()
        assert self._member is not None, "to join is the first order but Host"
        if isinstance(order, Prepare):
            self._member.prepare(order.number)
            return Ready()
        if isinstance(order, Settle):
            return self._member.settle()
        time.sleep(max(0.0, order.at_s - time.monotonic()))
        begun_s = time.perf_counter()
        self._member.reduce(order.side)
        return Finished(time.perf_counter() - begun_s)

    def close(self) -> None:
        """Part from the other ranks."""
        if self._member is not None:
            self._member.close()


def follow(orders: BinaryIO, say: Say) -> int:
    """Follow orders until there are no more; the exit code."""
    decoder = msgspec.json.Decoder(Order)
    rank = Rank()
    try:
        for line in orders:
            say(rank.obey(decoder.decode(line)))
        rank.close()
    except (TailboundError, ValueError, OSError, RuntimeError) as error:
        say(Broken((str(error).splitlines() or [type(error).__name__])[0]))
        return 1
    return 0


def main() -> int:
    """Be one rank of the benchmark."""
    die_with_parent()
    torch.set_num_threads(1)
    return follow(sys.stdin.buffer, take_stdout())


if __name__ == "__main__":
    sys.exit(main())

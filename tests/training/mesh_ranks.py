"""Ranks of a sharded job as threads of one process, which meet in one store."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from tailbound.config import LossBound, Transport
from tailbound.protocol.messages import BucketSpec
from tailbound.training.exchange import Exchange, MeshExchange
from tailbound.training.rendezvous import mesh_over
from training.ranks import EXACT, TIMEOUT_S, Work


def run_mesh(
    work: Work,
    *,
    num: int = 2,
    bound: LossBound = EXACT,
    transport: Transport | None = None,
    store: Store | None = None,
) -> list[Any]:
    """Run ``work(rank, make_exchange)`` on every rank; what each returned or raised."""
    met = store or HashStore()
    used = transport or Transport(timeout_s=TIMEOUT_S)

    def run(rank: int) -> Any:
        def make(specs: tuple[BucketSpec, ...]) -> Exchange:
            mesh = mesh_over(met, "mesh", rank, num, bound, used)
            return MeshExchange(mesh, specs, bound)

        return work(rank, make)

    with ThreadPoolExecutor(num) as pool:
        futures = [pool.submit(run, rank) for rank in range(num)]
        return [
            future.exception(2 * TIMEOUT_S) or future.result() for future in futures
        ]

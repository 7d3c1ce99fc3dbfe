"""Ranks of a job: threads of one process around a real server, or processes."""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tailbound.config import LossBound, Transport
from tailbound.protocol.messages import BucketSpec
from tailbound.training.attaching import MakeExchange
from tailbound.training.exchange import Exchange, GroupExchange
from tailbound.transport.group import Group, Server

EXACT = LossBound.fixed(0.0)
TIMEOUT_S = 20.0

Work = Callable[[int, MakeExchange], Any]


def meet_at(
    server: Server,
    rank: int,
    world_size: int,
    bound: LossBound = EXACT,
    transport: Transport | None = None,
) -> MakeExchange:
    """What makes this rank's exchange once its buckets are known."""

    def make(specs: tuple[BucketSpec, ...]) -> Exchange:
        return GroupExchange(
            Group(
                server.address,
                rank=rank,
                world_size=world_size,
                buckets=specs,
                bound=bound,
                transport=transport or Transport(timeout_s=TIMEOUT_S),
            )
        )

    return make


def run_ranks(
    work: Work,
    *,
    num: int = 2,
    bound: LossBound = EXACT,
    transport: Transport | None = None,
) -> list[Any]:
    """Run ``work(rank, make_exchange)`` on every rank; what each returned or raised."""
    transport = transport or Transport(timeout_s=TIMEOUT_S)
    server = Server(num, transport=transport)
    with ThreadPoolExecutor(num + 1) as pool:
        serving = pool.submit(server.run)
        futures = [
            pool.submit(work, rank, meet_at(server, rank, num, bound, transport))
            for rank in range(num)
        ]
        outcomes = [
            future.exception(2 * TIMEOUT_S) or future.result() for future in futures
        ]
        # Of a failed rank the server heard; who got on well must not hide its error.
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):
            serving.result(TIMEOUT_S)
    return outcomes


class Vector(nn.Module):
    """One weight per element, from 0: its gradient is the input's mean."""

    def __init__(self, size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The mean over samples of w * x, summed over elements."""
        return (self.w * x).sum(-1).mean()


def plain_sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    """After one step from 0 with rate 1 a weight is its negated gradient."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def build_mlp(seed: int) -> nn.Module:
    """A small model; the seed decides its first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def open_sockets() -> int:
    """Sockets of this process."""
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(
        os.readlink(link).startswith("socket:") for link in links if link.is_symlink()
    )


def leave() -> NoReturn:
    """End this rank's process, once its work is done and told.

    Without the interpreter's own shutdown: there torch 2.13 may abort ("terminate
    called without an active exception") when a thread of its process group wants the
    interpreter that is going. Seen in 2 runs of 600 on a busy machine, once of DDP
    without tailbound. What is ours to leave behind is checked here instead.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    left = [t.name for t in threading.enumerate() if t.name.startswith("tailbound")]
    if left:
        print(f"threads left: {left}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if left else 0)


def start_ranks(
    *arguments: str, script: str = "two_ranks.py", num: int = 2
) -> list[subprocess.Popen[str]]:
    """Start ranks by hand: rank 0 hosts the store, as without torchrun.

    Args:
        arguments: of the script.
        script: in this folder, or a path that leads out of it.
        num: ranks.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tests.parent / 'src'}{os.pathsep}{tests}",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num)
    ]


def finish(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each."""
    outputs = [rank.communicate(timeout=100.0) for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    return [(code, *output) for code, output in zip(codes, outputs, strict=True)]

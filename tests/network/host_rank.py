"""One rank of a job on a host of its own, started without torchrun.

Run as ``python tests/network/host_rank.py JSON`` with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set; the JSON holds the settings of the transport. Three exact steps with
2 MB of gradient. Prints a JSON line: the address, the mean, its UDP ports.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch

import tailbound
from tailbound.errors import ConfigError, TailboundError
from training.ranks import Vector, plain_sgd


def local_ports(name: str) -> list[int]:
    """Ports that sockets of this process's network are bound to."""
    tables = (Path(f"/proc/net/{name}{version}") for version in ("", "6"))
    lines = [
        line
        for table in tables
        for line in table.read_text(encoding="ascii").splitlines()[1:]
    ]
    return [int(line.split()[1].rpartition(":")[2], 16) for line in lines]


def main(settings: dict[str, object]) -> int:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tailbound")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    if "port_range" in settings:
        settings["port_range"] = tuple(settings["port_range"])  # type: ignore[arg-type]
    transport = tailbound.Transport(timeout_s=15.0, **settings)  # type: ignore[arg-type]
    model = Vector(500_000)
    try:
        with tailbound.attach(
            model,
            plain_sgd(model),
            network=tailbound.LossBound.fixed(0.0),
            transport=transport,
        ) as job:
            for _ in range(3):
                job.backward(model(torch.full((1, 500_000), 1.0 + job.rank)))
                job.step()
            udp = local_ports("udp")
            job.check_replicas()
    except (ConfigError, TailboundError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    address = next(line for line in told if " uses address " in line)
    print(json.dumps([address, model.w[0].item(), sorted(udp)]))
    return 0


if __name__ == "__main__":
    signal.alarm(100)  # whatever goes wrong, no test leaves a process behind
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    sys.exit(main(json.loads(sys.argv[1])))

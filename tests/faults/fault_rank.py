"""One rank of a job that something happens to, on a host of its own.

Run as ``python tests/faults/fault_rank.py JSON`` with torchrun's variables set. Prints
the number of each step that is over, and at the end the digest of the parameters.

The JSON: ``steps``; ``transport``, its settings; ``fail_at`` with ``fail_how``, what
this rank's own code does in that step; ``records``, a file to write them to.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import torch

import tailbound
from tailbound.errors import ConfigError, TailboundError
from training.ranks import Vector, plain_sgd

NUM = 200_000


def fail(how: str) -> None:
    """What user code may do to itself."""
    if how == "memory":
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
    raise ValueError("a label is out of range")


def main(told: dict[str, Any]) -> int:
    transport = tailbound.Transport(**told["transport"])
    writer = tailbound.RecordWriter(told["records"]) if "records" in told else None
    model = Vector(NUM)
    try:
        with tailbound.attach(
            model,
            plain_sgd(model, lr=0.01),
            micro_batches=2,
            network=tailbound.LossBound.fixed(0.01),
            transport=transport,
            on_record=writer,
        ) as job:
            for step in range(1, told["steps"] + 1):
                for number, value in enumerate(job.micro_batches(iter([1.0, 2.0]))):
                    if step == told.get("fail_at") and number == 1:
                        fail(told["fail_how"])
                    job.backward(model(torch.full((1, NUM), value + job.rank)))
                job.step()
                print(step, flush=True)
                time.sleep(0.01)  # what a real model would compute
            print(job.check_replicas(), flush=True)
    except (ConfigError, TailboundError, ValueError, RuntimeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    signal.alarm(100)  # whatever goes wrong, no test leaves a process behind
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    sys.exit(main(json.loads(sys.argv[1])))

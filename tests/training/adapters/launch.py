"""Start the ranks of a script under torchrun and take what each of them printed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_ranks(script: str, *, num: int = 2) -> list[Any]:
    """One JSON value of each rank, in rank order; raises if the script failed."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    inherited = os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num), str(HERE / script)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": paths if not inherited else f"{paths}{os.pathsep}{inherited}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    told = [
        json.loads(line[1:])
        for line in done.stdout.splitlines()
        if line.startswith("=")
    ]
    assert len(told) == num, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    return [value for _, value in sorted(told, key=lambda pair: pair[0])]


def tell(rank: int, value: Any) -> None:
    """Print what this rank found, for ``run_ranks``; in one write, others print too."""
    sys.stdout.write(f"={json.dumps([rank, value])}\n")
    sys.stdout.flush()

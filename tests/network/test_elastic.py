"""torchrun restarts a job whose rank 2 was killed in the middle of a step."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from namespaces import make_hosts, needs_namespaces

PROGRAM = str(Path(__file__).with_name("elastic_rank.py"))
ROOT = Path(__file__).parents[2]
LIMIT_S = 170.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.sockets,
    pytest.mark.timeout(200),
]


def torchrun(*arguments: str) -> list[str]:
    """A command line; agents look so seldom that survivors end by themselves."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2"),
        *("--monitor-interval", "2", *arguments),
    ]


def run(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run agents to their end; exit codes and outputs. None of it stays behind."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    agents = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        outputs = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    return [(agent.returncode, out) for agent, out in zip(agents, outputs, strict=True)]


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote, one entry for each attempt that it lived through."""
    lines = (folder / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check(folder: Path, outcomes: list[tuple[int, str]]) -> None:
    """The survivors named rank 2 at once, and all went on from step 5."""
    assert [code for code, _ in outcomes] == [0] * len(outcomes), outcomes
    for rank in (0, 1):
        first, second = told(folder, rank)
        kind, message, after_s = first["error"]
        assert kind == "PeerLostError"
        assert message.startswith("lost rank 2 during the gradient of round 8")
        assert "\n" not in message
        assert after_s < 5.0
        # p_low until the first check, p_high since: also right after the restart.
        bounds = {str(step): 0.0 if step < 3 else 0.4 for step in range(1, 8)}
        assert first["p"] == bounds
        assert second["restarted"]
        assert second["p"] == {str(step): 0.4 for step in range(6, 13)}
    (third,) = told(folder, 2)
    digests = {told(folder, rank)[-1]["digest"] for rank in (0, 1, 2)}
    assert third["error"] is None
    assert len(digests) == 1


def test_s18_on_one_host_training_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    command = torchrun("--standalone", "--nproc-per-node", "3", PROGRAM, str(tmp_path))

    check(tmp_path, run([command]))


@needs_namespaces
@pytest.mark.netns
def test_on_two_hosts_too_whatever_their_agents_count(tmp_path: Path) -> None:
    """The host that lost its rank counts a restart, the other one may not."""
    with make_hosts(2) as hosts:
        commands = [
            hosts.command(
                host,
                *torchrun(
                    *("--nnodes", "2", "--nproc-per-node", str(2 - host)),
                    *("--rdzv-backend", "c10d", "--rdzv-id", "job"),
                    *("--rdzv-endpoint", f"{hosts.address(0)}:29555"),
                    *("--rdzv-conf", f"is_host={1 - host}"),
                    *("--local-addr", hosts.address(host), PROGRAM, str(tmp_path)),
                ),
            )
            for host in range(2)
        ]

        check(tmp_path, run(commands))

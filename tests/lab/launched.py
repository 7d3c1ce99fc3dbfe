"""What a test must know of the processes that a demo started."""

import os
from pathlib import Path


def children_of(pid: int) -> dict[int, str]:
    """Living children's ids and what each is: ``server``, ``rank 0``, ..."""
    found: dict[int, str] = {}
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            role = role_of(child)
            if role:
                found[child] = role
    return found


def role_of(pid: int) -> str:
    """Which of the demo's processes this is, if any and if it lives."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if b"tailbound.lab.demo_process" not in command:
        return ""
    if b"server" in command:
        return "server"
    (rank,) = (one[5:].decode() for one in variables if one.startswith(b"RANK="))
    return f"rank {rank}"


def is_running(pid: int) -> bool:
    """False once the process is gone, or is a zombie that nobody waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def kill(role: str, number: int) -> int:
    """Send a signal to one of our own demo's processes; its id."""
    (pid,) = (pid for pid, one in children_of(os.getpid()).items() if one == role)
    os.kill(pid, number)
    return pid

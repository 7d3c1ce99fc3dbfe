"""Child processes that talk JSON lines: start, listen to all, end all."""

import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from tailbound.errors import TailboundError
from tailbound.lab.orders import Answer, Role

END_TIMEOUT_S = 3.0
"""How long a child may take to end by itself before it is killed."""
STDERR_LINES = 20

_decoder = msgspec.json.Decoder(Answer)


@dataclass(slots=True)
class Child:
    """One process and what it said that is no line yet."""

    name: str
    process: subprocess.Popen[bytes]
    pending: bytearray = field(default_factory=bytearray)
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))

    def tell(self, order: msgspec.Struct) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TailboundError(f"{self.name} is gone: {error.strerror}") from error


class Children:
    """A set of child processes; none outlives the ``with`` block."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def start(self, name: str, role: Role, *, env: dict[str, str]) -> Child:
        """Start a demo process."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tailbound.lab.demo_process", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_import_path(), **env},
        )
        child = Child(name, process)
        self._children.append(child)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (child, is_error))
        return child

    def listen(self, timeout_s: float) -> Iterator[tuple[Child, Answer]]:
        """Yield what the children said, as it comes; waits at most ``timeout_s``.

        Raises:
            TailboundError: a child ended by itself; carries its last error line.
        """
        for key, _ in self._selector.select(timeout_s):
            child, is_error = key.data
            data = os.read(key.fd, 1 << 20)
            if not data:
                self._selector.unregister(key.fileobj)
                if not is_error:
                    self._raise_gone(child)
            elif is_error:
                child.stderr.extend(data.decode(errors="replace").splitlines())
            else:
                child.pending += data
                *lines, rest = child.pending.split(b"\n")
                child.pending = bytearray(rest)
                for line in lines:
                    yield child, _decoder.decode(line)

    def _raise_gone(self, child: Child) -> None:
        try:
            code = child.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        last = next((line for line in reversed(child.stderr) if line.strip()), "")
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else (f"ended with exit code {code}")
        )
        raise TailboundError(f"{child.name} {how}{': ' + last if last else ''}")

    def __enter__(self) -> "Children":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.close()
            if error is not None:
                child.process.terminate()
        for child in self._children:
            try:
                child.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            for stream in (child.process.stdout, child.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()


def _import_path() -> dict[str, str]:
    """Let children import this very package, installed or not."""
    home = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home}

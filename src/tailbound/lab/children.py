"""Child processes that talk JSON lines: start, listen to all, end all."""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import msgspec

from tailbound.errors import TailboundError

END_TIMEOUT_S = 3.0
"""How long children may take to end by themselves before they are killed."""
KILLED_PATIENCE_S = 1.0
STDERR_LINES = 20
READ_BYTES = 1 << 20

A = TypeVar("A")
"""What the children of a set answer."""


@dataclass(slots=True, eq=False)
class Child(Generic[A]):
    """One process and what it said that is no line yet."""

    name: str
    process: subprocess.Popen[bytes]
    decode: Callable[[bytes], A]
    pending: bytearray = field(default_factory=bytearray)
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))

    def tell(self, order: msgspec.Struct) -> None:
        """Send an order.

        Raises:
            TailboundError: the process is gone; says how it ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TailboundError(self.describe_end()) from error

    def describe_end(self) -> str:
        """How the process ended: its name, signal or exit code, and its last words."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its standard output and still runs"
        self._read_last_words()
        last = next((line for line in reversed(self.stderr) if line.strip()), "")
        if code >= 0:
            return f"{self.name} ended with exit code {code}{last and ': ' + last}"
        how = f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name})"
        if -code == signal.SIGKILL:
            how += "; if nobody did that, memory ran out: see `dmesg`"
        return how

    def take(self, data: bytes) -> Iterator[A]:
        """Yield the answers that these bytes complete.

        Raises:
            TailboundError: a line is no answer.
        """
        self.pending += data
        *lines, rest = self.pending.split(b"\n")
        self.pending = bytearray(rest)
        for line in lines:
            try:
                yield self.decode(bytes(line))
            except msgspec.DecodeError as error:
                start = line[:80].decode(errors="replace")
                raise TailboundError(
                    f"{self.name} said what is no answer ({error}): {start}"
                ) from error

    def take_error(self, data: bytes) -> None:
        """Keep the last lines of its standard error."""
        self.stderr.extend(data.decode(errors="replace").splitlines())

    def _read_last_words(self) -> None:
        stream = self.process.stderr
        if stream is not None and not stream.closed:
            with suppress(BlockingIOError):
                while data := os.read(stream.fileno(), READ_BYTES):
                    self.take_error(data)


class Children(Generic[A]):
    """A set of child processes; none outlives the ``with`` block.

    Args:
        decode: makes an answer of a line, or raises msgspec.DecodeError.
    """

    def __init__(self, decode: Callable[[bytes], A]) -> None:
        self._decode = decode
        self._children: list[Child[A]] = []
        self._selector = selectors.DefaultSelector()

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str]
    ) -> Child[A]:
        """Start a process, which can import this very package, installed or not.

        Args:
            name: for messages.
            command: program and arguments.
            env: what its environment has beyond ours.
        """
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **import_path(), **env},
        )
        child = Child(name, process, self._decode)
        self._children.append(child)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (child, is_error))
        return child

    def listen(self, timeout_s: float) -> Iterator[tuple[Child[A], A]]:
        """Yield what the children said, as it comes; waits at most ``timeout_s``.

        Raises:
            TailboundError: a child ended by itself, or said what is no answer.
        """
        gone: list[Child[A]] = []
        for key, _ in self._selector.select(timeout_s):
            child, is_error = key.data
            data = os.read(key.fd, READ_BYTES)
            if not data:
                self._selector.unregister(key.fileobj)
                if not is_error:
                    gone.append(child)
            elif is_error:
                child.take_error(data)
            else:
                for answer in child.take(data):
                    yield child, answer
        if gone:
            raise TailboundError((self.find_killed(0.0) or gone[0]).describe_end())

    def find_killed(self, patience_s: float = KILLED_PATIENCE_S) -> Child[A] | None:
        """A child that a signal ended: the cause, where others only felt it.

        Its connections close before the kernel says that it is gone, so a peer's
        complaint may be here first; hence the patience.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            for child in self._children:
                code = child.process.poll()
                if code is not None and code < 0:
                    return child
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.01)

    def find_cause(self, child: Child[A], message: str) -> TailboundError:
        """What to raise when a child says that it failed: of a killed one, if any."""
        killed = self.find_killed()
        told = killed.describe_end() if killed else f"{child.name}: {message}"
        return TailboundError(told)

    def __enter__(self) -> "Children[A]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            if child.process.stdin is not None:
                with suppress(OSError):  # an order that the child never read
                    child.process.stdin.close()
            if error is not None:
                child.process.terminate()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            for stream in (child.process.stdout, child.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()


def import_path() -> dict[str, str]:
    """The variable that lets a child import this very package."""
    home = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home}

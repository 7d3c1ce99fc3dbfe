"""Child processes that talk JSON lines: start, listen to all, end all."""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from tailbound.errors import TailboundError
from tailbound.lab.orders import Answer

END_TIMEOUT_S = 3.0
"""How long children may take to end by themselves before they are killed."""
KILLED_PATIENCE_S = 1.0
STDERR_LINES = 20
READ_BYTES = 1 << 20

_decoder = msgspec.json.Decoder(Answer)


@dataclass(slots=True, eq=False)
class Child:
    """One process and what it said that is no line yet."""

    name: str
    process: subprocess.Popen[bytes]
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

    def take(self, data: bytes) -> Iterator[Answer]:
        """Yield the answers that these bytes complete.

        Raises:
            TailboundError: a line is no answer.
        """
        self.pending += data
        *lines, rest = self.pending.split(b"\n")
        self.pending = bytearray(rest)
        for line in lines:
            try:
                yield _decoder.decode(line)
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


class Children:
    """A set of child processes; none outlives the ``with`` block."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str]
    ) -> Child:
        """Start a process.

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
            env={**os.environ, **env},
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
            TailboundError: a child ended by itself, or said what is no answer.
        """
        gone: list[Child] = []
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

    def find_killed(self, patience_s: float = KILLED_PATIENCE_S) -> Child | None:
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

"""Record how long each micro-batch takes, in anyone's loop, for ``tailbound plan``.

::

    with tailbound.record_latencies("trace-{rank}.csv") as recorder:
        for batch in loader:
            for x, y in recorder.micro_batches(batch):
                loss_fn(model(x), y).backward()
            recorder.end_step()
            optimizer.step()

What lies between ``end_step`` and the next micro-batch, such as the all-reduce and the
optimizer, is not counted: a threshold cannot cut it. Fetching a micro-batch is.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tailbound.compute.columns import NAMES
from tailbound.errors import ConfigError
from tailbound.training.clocks import ComputeClock, make_clock
from tailbound.training.rendezvous import find_place

Part = TypeVar("Part")


def record_latencies(
    path: Path | str,
    *,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    warmup_steps: int = 5,
    clock: ComputeClock | None = None,
) -> "LatencyRecorder":
    """Open a trace file for this process; changes nothing in the training.

    On a GPU the times are those of events in its own queue, read when the step ends.

    Args:
        path: of the CSV file; ``{rank}`` in it stands for this process's rank, from
            torch.distributed or torchrun. Its folder is made; a file that was there is
            replaced.
        model: needed if a backward reduces gradients, as in DistributedDataParallel:
            a micro-batch then ends with its last gradient, and waiting for other ranks
            is not counted.
        device: that computes; None: the model's, or a GPU if there is one.
        warmup_steps: first steps that are left out: compilers, caches and allocators
            settle.
        clock: measures the compute; None: the one for the device.

    Returns:
        A recorder; close it, or use it in ``with``.

    Raises:
        ConfigError: the path is no .csv, all ranks would write to the same file, or
            the environment is no place in a job.
        OSError: the file cannot be written.
    """
    place = find_place()
    name = str(path).replace("{rank}", str(place.rank))
    if not name.endswith(".csv"):
        raise ConfigError(f"a trace is recorded into a .csv file, not {path}")
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps is 0 or more steps, not {warmup_steps}")
    if place.world_size > 1 and name == str(path):
        raise ConfigError(
            f"all {place.world_size} ranks would write into {path}; put {{rank}} into "
            "its name"
        )
    parameters = [] if model is None else list(model.parameters())
    if clock is None:
        if device is None and parameters:
            device = parameters[0].device
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        clock = make_clock(torch.device(device))
    return LatencyRecorder(Path(name), place.rank, parameters, warmup_steps, clock)


class LatencyRecorder:
    """Times micro-batches and appends them to a file; see :func:`record_latencies`.

    Each step is one write, so that a crash loses none that ended.

    Args:
        path: of the file.
        rank: the worker in the trace.
        parameters: whose last gradient ends a micro-batch; none: the end of the
            loop's body does.
        warmup_steps: first steps that are not written.
        clock: measures the compute.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        parameters: list[nn.Parameter],
        warmup_steps: int,
        clock: ComputeClock,
    ) -> None:
        self.path = path
        self._rank, self._warmup_steps, self._clock = rank, warmup_steps, clock
        self._step = 0
        self._num_marks = 0
        self._spans: list[tuple[int, int]] = []
        """Marks of the clock at which each finished micro-batch began and ended."""
        self._begin: int | None = None
        """That of the running micro-batch."""
        self._end: int | None = None
        """After the last gradient that it got so far."""
        self._is_end_queued = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_grad
            )
            for parameter in parameters
            if parameter.requires_grad
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(f"{','.join(NAMES)}\n".encode())

    def micro_batches(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Give the micro-batches on, and time what is done with each.

        Args:
            parts: those of a step, or of all steps if ``end_step`` is called inside.
        """
        source = iter(parts)
        while True:
            begin = self._mark()
            try:
                part = next(source)
            except StopIteration:
                return
            self._begin, self._end, self._is_end_queued = begin, None, False
            try:
                yield part
            finally:  # a caller that leaves its loop has finished this one
                self._finish()

    def end_step(self) -> None:
        """Write the step's latencies; call it before all-reduce and optimizer.

        On a GPU this waits until the step's micro-batches are computed.
        """
        self._finish()
        if self._step >= self._warmup_steps and self._spans:
            interval_s = self._clock.latency_s()
            rows = (
                f"{self._step},{self._rank},{number},"
                f"{math.fsum(interval_s[begin:end]):.9g}\n"
                for number, (begin, end) in enumerate(self._spans)
            )
            self._file.write("".join(rows).encode())
        self._step += 1
        self._num_marks = 0
        self._spans = []

    def close(self) -> None:
        """Close the file, and take the hooks off. Closing twice is fine.

        A step that did not end is not written.
        """
        self._file.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "LatencyRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None and self._step <= self._warmup_steps:
            warnings.warn(
                f"{self.path}: nothing was recorded; {self._step} steps ended, and the "
                f"first {self._warmup_steps} are left out (warmup_steps)",
                stacklevel=2,
            )

    def _mark(self) -> int:
        """Have the clock mark the time; the mark's number in this step."""
        if self._num_marks == 0:
            self._clock.begin()
        else:
            self._clock.mark()
        self._num_marks += 1
        return self._num_marks - 1

    def _finish(self) -> None:
        """End the running micro-batch, if there is one."""
        if self._begin is not None:
            end = self._mark() if self._end is None else self._end
            self._spans.append((self._begin, end))
            self._begin = None

    def _on_grad(self, _: Tensor) -> None:
        """Have the time marked when this backward is through.

        Calls that are queued by then run in order, and DistributedDataParallel queues
        its wait for the other ranks later, with its last bucket.
        """
        if self._begin is not None and not self._is_end_queued:
            self._is_end_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._is_end_queued = False
        self._end = self._mark()

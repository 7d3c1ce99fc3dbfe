"""How long this rank has computed in a step, on the CPU or by events of a GPU (C11).

A clock is begun once a step and marked at the end of each micro-batch. Waiting for
peers, the optimizer and the loader lie between steps and are not in it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

POLL_S = 5e-5
"""Between two looks at an event: short against a micro-batch, long against a look."""
MAX_RUN_AHEAD = 1
"""Micro-batches that may be queued beyond the one that the device works on. With none
it would idle between two; with more, a threshold could not stop those under way."""


class ComputeClock(ABC):
    """Measures the micro-batches of one step at a time."""

    @abstractmethod
    def begin(self) -> None:
        """The first micro-batch of a step starts."""

    @abstractmethod
    def mark(self) -> None:
        """A micro-batch ended, and the next starts."""

    @abstractmethod
    def elapsed_s(self) -> float:
        """Seconds of compute in this step so far."""

    @abstractmethod
    def latency_s(self) -> tuple[float, ...]:
        """Seconds of each micro-batch up to the last mark; may wait for the device."""


class CpuClock(ComputeClock):
    """Reads the host's clock: what the host computes is over when it returns.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun_s = self._marked_s = 0.0
        self._latency_s: list[float] = []

    def begin(self) -> None:
        """See ComputeClock."""
        self._begun_s = self._marked_s = self._now()
        self._latency_s = []

    def mark(self) -> None:
        """See ComputeClock."""
        now = self._now()
        self._latency_s.append(now - self._marked_s)
        self._marked_s = now

    def elapsed_s(self) -> float:
        """See ComputeClock."""
        return self._now() - self._begun_s

    def latency_s(self) -> tuple[float, ...]:
        """See ComputeClock."""
        return tuple(self._latency_s)


class Event(Protocol):
    """What is used of ``torch.cuda.Event``; times are in milliseconds."""

    def record(self) -> None:
        """Put a mark into the device's queue."""
        ...

    def query(self) -> bool:
        """True once the device has passed the mark."""
        ...

    def elapsed_time(self, end: "Event", /) -> float:
        """Milliseconds from this mark to another; both have passed."""
        ...


class EventClock(ComputeClock):
    """Reads events in the device's own queue, polled: no wait for the whole device.

    The host may run ahead of the device, so a question for the time waits until at
    most ``max_run_ahead`` marked micro-batches are unfinished, and counts those as long
    as the last finished one.

    Args:
        make_event: gives a new event with timing.
        sleep: waits the given seconds between two looks.
        max_run_ahead: see above.
    """

    def __init__(
        self,
        make_event: Callable[[], Event],
        *,
        sleep: Callable[[float], None] = time.sleep,
        max_run_ahead: int = MAX_RUN_AHEAD,
    ) -> None:
        self._make_event, self._sleep = make_event, sleep
        self._max_run_ahead = max_run_ahead
        self._events: list[Event] = []
        self._done = 0
        """Events known to have passed, the first of the step included."""

    def begin(self) -> None:
        """See ComputeClock."""
        self._events, self._done = [], 0
        self.mark()

    def mark(self) -> None:
        """See ComputeClock."""
        event = self._make_event()
        event.record()
        self._events.append(event)

    def elapsed_s(self) -> float:
        """See ComputeClock."""
        self._wait(self._max_run_ahead)
        events, done = self._events, self._done
        if done < 2:
            return 0.0
        last_s = events[done - 2].elapsed_time(events[done - 1]) / 1e3
        passed_s = events[0].elapsed_time(events[done - 1]) / 1e3
        return passed_s + last_s * (len(events) - done)

    def latency_s(self) -> tuple[float, ...]:
        """See ComputeClock."""
        self._wait(0)
        pairs = zip(self._events, self._events[1:], strict=False)
        return tuple(start.elapsed_time(end) / 1e3 for start, end in pairs)

    def _wait(self, run_ahead: int) -> None:
        """Poll until at most ``run_ahead`` events have not passed."""
        events = self._events
        while True:
            while self._done < len(events) and events[self._done].query():
                self._done += 1
            if len(events) - self._done <= run_ahead:
                return
            self._sleep(POLL_S)


def make_clock(device: torch.device) -> ComputeClock:
    """The clock for a model on this device."""
    if device.type == "cuda":
        make_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
        return EventClock(make_event)
    return CpuClock()

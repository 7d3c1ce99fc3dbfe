"""What every blocking face of the transport shares: a station, a thread, an end."""

import functools
import logging
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from tailbound.config import Transport
from tailbound.errors import (
    JobClosedError,
    RemoteError,
    RoundTimeoutError,
    TailboundError,
)
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import (
    Ended,
    Event,
    Failed,
    Gathered,
    Reduced,
    Started,
    peer_name,
)
from tailbound.protocol.intake import LinkCounters
from tailbound.transport.counters import UdpStatistics, add_statistics
from tailbound.transport.driver import Driver
from tailbound.transport.station import Station

_log = logging.getLogger("tailbound")

E = TypeVar("E", Started, Reduced, Gathered, Ended)

STOP_TIMEOUT_S = 5.0
CALL_POLL_S = 0.5
"""How often a call looks whether the driver still lives."""


def warn_if_given_up(reduced: Reduced) -> None:
    """Log it if a deadline gave up more of this rank's gradient than p."""
    if any(report.given_up for report in reduced.reports):
        warn_given_up()


@functools.cache
def warn_given_up() -> None:
    """Log that more than the loss bound was given up; once per process."""
    _log.warning(
        "a gradient was closed at its deadline with more missing than the loss bound "
        "allows; RoundReport.given_up counts the chunks, round by round. If it happens "
        "often, raise LossBound's deadline_s, or deadline_cap_s with 'auto'. Said once"
    )


class Events:
    """Events of one station, handed from the driver's thread to the caller's."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.error: TailboundError | None = None

    def put(self, event: Event) -> None:
        """Take an event, in the driver's thread."""
        if isinstance(event, Reduced):
            warn_if_given_up(event)
        self._queue.put(event)

    def wait(self, kind: type[E], timeout_s: float, phase: str) -> E:
        """Wait for an event of this kind; a Failed is raised.

        The endpoint has its own, shorter deadlines with better names; this one is the
        last resort if the driver itself stands still.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self.error is not None:
                raise self.error
            try:
                event = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise RoundTimeoutError(
                    "the transport", phase, 0, 0, timeout_s
                ) from None
            if isinstance(event, Failed):
                self.error = event.error
            elif isinstance(event, kind):
                return event


class Member:
    """One rank's membership in a job, whatever the plan."""

    rank: int
    world_size: int

    def __init__(self, endpoint: Endpoint, transport: Transport) -> None:
        self._transport = transport
        self._events = Events()
        self._closed = False
        self._member = endpoint
        self._driver = Driver()
        self._stations: list[Station] = []
        """All that this process runs, this rank's own first."""

    def counters(self) -> LinkCounters:
        """Datagrams by fate, so far."""
        return self._member.counters()

    def udp_statistics(self) -> UdpStatistics:
        """What this rank's sockets counted, their own overflow included."""
        return add_statistics(
            conduit.udp.statistics() for conduit in self._stations[0].conduits.values()
        )

    def abort(self, reason: str) -> None:
        """Leave because of an error of our own; all other ranks are told why."""
        if self._closed:
            return
        name = peer_name(self.rank)
        self._driver.call(lambda: self._member.fail(RemoteError(name, reason)))
        self._shut()

    def close(self) -> None:
        """Say goodbye and close every socket. Closing twice is fine."""
        if self._closed:
            return
        if self._events.error is None:
            self._driver.call(self._say_goodbye)
            try:
                self._events.wait(Ended, self._transport.timeout_s, "the goodbye")
                self._wait_for_others()
            finally:
                self._shut()
        self._shut()

    def _say_goodbye(self) -> None:
        """In the driver's thread: tell the peers; their answer is an Ended event."""
        raise NotImplementedError

    def _wait_for_others(self) -> None:
        """Stay while others need what this process hosts."""

    def _shut(self) -> None:
        """Let the last control bytes leave, then end the thread."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        flushed = queue.SimpleQueue[bool]()
        while self._driver.is_running and time.monotonic() < deadline_s:
            self._driver.call(lambda: flushed.put(self._is_flushed()))
            try:
                if flushed.get(timeout=0.2):
                    break
            except queue.Empty:
                continue
            time.sleep(0.001)
        self._driver.stop(STOP_TIMEOUT_S)
        for station in self._stations:
            station.close()  # if the driver never got it

    def _is_flushed(self) -> bool:
        return all(
            (not conduit.outgoing and not conduit.link.control)
            or conduit.lost is not None
            for station in self._stations
            for conduit in station.conduits.values()
        )

    def _require_open(self) -> None:
        if self._events.error is not None:
            raise self._events.error
        if self._closed:
            raise JobClosedError("the job is closed; attach again to go on")

    def _run(self, function: Callable[[], None]) -> None:
        """Run in the driver's thread; an error of the call is raised here."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def guarded() -> None:
            try:
                function()
            except ValueError as error:
                done.put(error)
            else:
                done.put(None)

        self._driver.call(guarded)
        deadline_s = time.monotonic() + self._transport.timeout_s
        while True:
            try:
                error = done.get(timeout=CALL_POLL_S)
            except queue.Empty:
                if not self._driver.is_running or time.monotonic() > deadline_s:
                    # A thread that ended said why: that is what this raises.
                    self._events.wait(Ended, 0.0, "a call")
                continue
            if error is not None:
                raise error
            return

    @property
    def _longest_wait_s(self) -> float:
        """Longer than any deadline of the endpoint, whose errors name the culprit."""
        return 3 * self._transport.timeout_s + 10.0

    def _wait(self, kind: type[E], phase: str) -> E:
        return self._events.wait(kind, self._longest_wait_s, phase)

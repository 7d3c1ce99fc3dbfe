"""Endpoints in memory, bad links between them, and a clock that jumps.

No socket and no sleep: time moves to whatever is due next. Everything follows from the
seed, so a failing run is replayed by its seed.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import (
    Ended,
    Event,
    Failed,
    Gathered,
    Reduced,
    Started,
)
from tailbound.testing.impaired_path import Batch, ImpairedPath

E = TypeVar("E", Started, Reduced, Gathered, Ended)

BATCH_BYTES = 65535
MAX_SEGMENTS = 64
MAX_IDLE_TURNS = 8
"""Turns in a row in which nothing moves, the clock included: a machine whose timer is
due has nothing to do then, and a real driver would spin at full CPU."""


@dataclass(slots=True, eq=False)
class Station:
    """One endpoint and the paths that lead to it, one per link."""

    endpoint: Endpoint
    paths: dict[int, ImpairedPath]
    events: deque[Event] = field(default_factory=deque)
    cut: set[int] = field(default_factory=set)
    """Links whose datagrams towards this endpoint vanish; control still passes."""
    routes: dict[int, tuple["Station", int]] = field(default_factory=dict)
    """Where each of its links leads: the station there, and its number of the link."""
    is_dead: bool = False
    """Its process is gone."""


class FakeLinks:
    """Stations and the links between them, whatever the plan.

    Args:
        max_datagram_bytes: larger UDP payloads vanish on the way, as on a path whose
            routers carry less than both ends believe.
        tick_s: the clock stops at multiples of it only, so what is due in between is
            delivered together, as to a process that wakes up so often. 0: exact times.
    """

    def __init__(self, *, max_datagram_bytes: int, tick_s: float) -> None:
        self.now = 0.0
        self.on_turn: Callable[[], None] = _do_nothing
        """Called in every turn, before anything is delivered."""
        self._tick_s = tick_s
        self._max_datagram_bytes = max_datagram_bytes
        self._out = memoryview(bytearray(BATCH_BYTES))
        self._idle_turns = 0
        self._others: list[Station] = []
        """A server, if there is one."""
        self._workers: list[Station] = []
        """The ranks."""

    # -- what a test does ------------------------------------------------------

    def run_until(self, kind: type[E], ranks: Iterable[int] | None = None) -> list[E]:
        """Turn until these workers have an event of this kind, by default all.

        Returns:
            Their events, in the order of ``ranks``.

        Raises:
            TailboundError: one of them failed.
            AssertionError: nothing is due any more, or the machines spin.
        """
        waiting = list(range(len(self._workers)) if ranks is None else ranks)
        found: dict[int, E] = {}
        is_alive = True
        while is_alive:
            is_alive = self.turn()
            for rank in waiting:
                events = self._workers[rank].events
                while rank not in found and events:
                    event = events.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, kind):
                        found[rank] = event
            if len(found) == len(waiting):
                return [found[rank] for rank in waiting]
        raise AssertionError(f"no {kind.__name__} on every worker by {self.now} s")

    def run_for(self, duration_s: float) -> None:
        """Let virtual seconds pass, whatever happens in them."""
        stop_s = self.now + duration_s
        while self.now < stop_s:
            self._turn(stop_s)
        self.deliver()

    def deliver(self) -> bool:
        """Let everything due at ``now`` happen; the clock stands.

        Returns:
            True if anything moved.
        """
        self.on_turn()
        stations = self._living()
        for station in stations:
            self._settle(station)
        # A test or a timer may have moved any of them; later only news does.
        busy = stations
        moved = False
        while busy:
            for station in busy:
                moved |= self._send(station)
            busy = [station for station in stations if self._receive(station)]
            moved |= bool(busy)
        return moved

    def turn(self) -> bool:
        """Let everything due at ``now`` happen, then move the clock.

        Returns:
            False if nothing is due ever again.
        """
        return self._turn(math.inf)

    # -- inside ----------------------------------------------------------------

    def _turn(self, stop_s: float) -> bool:
        """See turn; the clock moves to ``stop_s`` at most."""
        moved = self.deliver()
        stations = self._living()
        next_s = min(stop_s, *(self._next_s(station) for station in stations))
        if next_s == math.inf:
            return False
        if self._tick_s:
            # The product may be a hair below what it was made from.
            on_tick_s = math.ceil(next_s / self._tick_s) * self._tick_s
            next_s = max(next_s, on_tick_s)
        self._idle_turns = 0 if moved or next_s > self.now else self._idle_turns + 1
        if self._idle_turns > MAX_IDLE_TURNS:
            raise AssertionError(f"a timer is due at {next_s} s with nothing to do")
        self.now = max(self.now, next_s)
        for station in stations:
            due = station.endpoint.timer()
            if due is not None and due <= self.now:
                station.endpoint.handle_timer(self.now)
        return True

    def _living(self) -> list[Station]:
        return [s for s in (*self._others, *self._workers) if not s.is_dead]

    def _send(self, station: Station) -> bool:
        """Carry what an endpoint has to send onto the paths."""
        moved = False
        for link, (target, number) in station.routes.items():
            # An endpoint forgets a stranger's link, which a driver then closes.
            if not target.is_dead and link in station.endpoint.links:
                moved |= self._carry(station.endpoint, link, target, number)
        return moved

    def _carry(self, source: Endpoint, link: int, target: Station, number: int) -> bool:
        path = target.paths[number]
        moved = False
        while True:
            while (data := source.next_control(link)) is not None:
                path.push_control(data, self.now)
                moved = True
            sent = source.next_datagrams(
                link,
                self._out,
                self.now,
                max_segments=MAX_SEGMENTS,
                max_bytes=BATCH_BYTES,
            )
            if sent is None:
                return moved
            moved = True
            fits = min(sent) <= self._max_datagram_bytes
            if fits and number not in target.cut:
                path.push_datagrams(Batch(self._out, *sent), self.now)

    def _receive(self, station: Station) -> bool:
        """Hand an endpoint what is due, as a driver does: datagrams, then control."""
        due = [
            (number, path)
            for number, path in station.paths.items()
            if (due_s := path.next_due_s()) is not None and due_s <= self.now
        ]
        if not due:
            return False
        endpoint = station.endpoint
        control = [(number, path.pop_control(self.now)) for number, path in due]
        for number, path in due:
            for batch in path.pop_datagrams(self.now):
                if number not in endpoint.links:
                    continue
                endpoint.receive_datagrams(number, *batch, self.now)
        endpoint.settle(self.now)
        for number, messages in control:
            for data in messages:
                endpoint.receive_control(number, data, self.now)
        self._settle(station)
        return True

    def _settle(self, station: Station) -> None:
        station.endpoint.settle(self.now)
        while (event := station.endpoint.next_event()) is not None:
            station.events.append(event)

    def _next_s(self, station: Station) -> float:
        dues = [path.next_due_s() for path in station.paths.values()]
        # A pending repair waits for next_datagrams, which the endpoint's timer covers.
        dues.append(station.endpoint.timer())
        return min((due for due in dues if due is not None), default=math.inf)


def _do_nothing() -> None:
    """Stand in for a hook that nobody set."""

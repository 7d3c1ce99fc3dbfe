"""The one thread of a process: waits for sockets and times, turns the stations.

Each turn reads the control streams, drains the datagram queues, hands both on, sends
what the endpoints have, and reports events. Other threads reach it by ``call``, which
runs a function in this thread; nothing else of it may be touched from outside.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from tailbound.errors import TailboundError
from tailbound.protocol.accepting import AcceptingEndpoint
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import Ended, Failed
from tailbound.transport.conduit import Conduit
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.station import Station

_log = logging.getLogger("tailbound")

LONGEST_WAIT_S = 1.0
LINGER_S = 2.0
"""How long a station that ended still tries to hand over its last control bytes."""


class Driver:
    """Runs stations in a thread of its own, or in the caller's by ``run``."""

    def __init__(self) -> None:
        self.stations: list[Station] = []
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self._by_tcp: dict[int, tuple[Station, Conduit]] = {}
        self._by_udp: dict[int, tuple[Station, Conduit]] = {}
        self._by_listener: dict[int, Station] = {}
        self._masks: dict[int, int] = {}
        self._over_s: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        close_in_forked_children(self)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the driver's thread, soon; nothing happens once closed."""
        if self._wake >= 0:
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        """Run in a daemon thread; an unfinished job never keeps a process alive."""
        self._thread = threading.Thread(
            target=self.run, name="tailbound-driver", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Calls are carried out: the thread was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread and close all sockets; from any other thread."""
        if self._thread is None:
            self.close()
            return
        self.call(self._set_stopping)
        thread = self._thread
        thread.join(timeout_s)
        self._thread = None
        if not thread.is_alive():  # else it closes everything when it ends
            self.close()

    def _set_stopping(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """Turn until stopped or all stations are over; closes everything."""
        try:
            while not self._stopping:
                self._turn()
                if self._thread is None and all(s.is_over for s in self.stations):
                    break
        except Exception as error:
            # A bug of ours must reach the caller, which waits for an event.
            _log.exception("the transport thread failed")
            for station in self.stations:
                failure = TailboundError(f"the transport thread failed: {error!r}")
                station.on_event(Failed(failure))
            if self._thread is None:
                raise
        finally:
            self._close_sockets()
            if self._thread is None:
                self.close()

    def add(self, station: Station) -> None:
        """Take over a station; in the driver's thread or before it starts."""
        self.stations.append(station)
        if station.listener is not None:
            self._by_listener[station.listener.fileno()] = station
            self._epoll.register(station.listener.fileno(), select.EPOLLIN)
        for conduit in station.conduits.values():
            self.register(station, conduit)

    def close(self) -> None:
        """Close everything; not while the thread runs. Closing twice is fine."""
        self._close_sockets()
        # Last, and never by the thread: ``call`` must not write to a reused number.
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _close_sockets(self) -> None:
        for station in self.stations:
            station.close()
        self._epoll.close()

    def register(self, station: Station, conduit: Conduit) -> None:
        """Watch a conduit that was added to a station; in the driver's thread."""
        for fd, table in (
            (conduit.tcp.fileno(), self._by_tcp),
            (conduit.udp.fileno(), self._by_udp),
        ):
            table[fd] = (station, conduit)
            self._masks[fd] = select.EPOLLIN
            self._epoll.register(fd, select.EPOLLIN)

    def _unregister(self, conduit: Conduit) -> None:
        self._forget(conduit.tcp.fileno(), self._by_tcp)
        self._forget(conduit.udp.fileno(), self._by_udp)

    def _forget(self, fd: int, table: dict[int, tuple[Station, Conduit]]) -> None:
        if table.pop(fd, None) is not None:
            self._masks.pop(fd)
            self._epoll.unregister(fd)

    def _watch(self, fd: int, mask: int) -> None:
        if self._masks.get(fd, mask) != mask:
            self._masks[fd] = mask
            self._epoll.modify(fd, mask)

    def _turn(self) -> None:
        readable = self._wait()
        while self._calls:
            self._calls.popleft()()
        for fd in readable:
            if fd in self._by_tcp:
                self._by_tcp[fd][1].read_control()
            elif fd in self._by_listener:
                self._accept(self._by_listener[fd])
        # After the control streams: what was sent before a probe is in the queue now.
        for fd, (station, conduit) in self._by_udp.items():
            if fd in readable or conduit.incoming or not conduit.is_drained:
                station.drain(conduit, time.monotonic())
        for station in self.stations:
            self._turn_station(station)

    def _turn_station(self, station: Station) -> None:
        now = time.monotonic()
        endpoint = station.endpoint
        station.hand_on(now)
        if isinstance(endpoint, AcceptingEndpoint):
            self._close_dropped(station, endpoint)
        for conduit in station.conduits.values():
            room = conduit.send_datagrams(endpoint)
            waits = not room and conduit.retry_s is None
            udp_mask = select.EPOLLIN | (select.EPOLLOUT if waits else 0)
            self._watch(conduit.udp.fileno(), udp_mask)
            flushed = conduit.write_control()
            if conduit.lost:
                # A closed stream is always readable: it would keep us awake.
                self._forget(conduit.tcp.fileno(), self._by_tcp)
            else:
                tcp_mask = select.EPOLLIN | (0 if flushed else select.EPOLLOUT)
                self._watch(conduit.tcp.fileno(), tcp_mask)
        while (event := endpoint.next_event()) is not None:
            if isinstance(event, Failed | Ended):
                self._over_s[id(station)] = now
            station.on_event(event)
        if id(station) in self._over_s and not station.is_over:
            flushed = all(not c.outgoing or c.lost for c in station.conduits.values())
            late = now > self._over_s[id(station)] + LINGER_S
            station.is_over = flushed or late

    def _close_dropped(self, station: Station, endpoint: AcceptingEndpoint) -> None:
        while endpoint.dropped:
            conduit = station.conduits.pop(endpoint.dropped.pop())
            self._unregister(conduit)
            conduit.close()

    def _accept(self, station: Station) -> None:
        endpoint = station.endpoint
        for conduit, link in station.accept_all():
            self.register(station, conduit)
            if isinstance(endpoint, AcceptingEndpoint):
                endpoint.accept(conduit.number, link)

    def _wait(self) -> set[int]:
        """Sleep until a socket is ready or something is due; fds that are readable."""
        timeout_s = self._timeout_s()
        fd = self._epoll.fileno()
        if timeout_s > 0.0 and fd < 1024:
            # epoll counts in milliseconds, select in microseconds: a round trip of
            # 1 ms must not be rounded up to 2.
            select.select([fd], [], [], timeout_s)
            timeout_s = 0.0
        ready = self._epoll.poll(timeout_s)
        readable = {fd for fd, mask in ready if mask & ~select.EPOLLOUT}
        if self._wake in readable:
            os.eventfd_read(self._wake)
        return readable

    def _timeout_s(self) -> float:
        if self._calls:
            return 0.0
        now = time.monotonic()
        timeout_s = LONGEST_WAIT_S
        for station in self.stations:
            if self._has_work(station, now):
                return 0.0
            due_s = station.next_due_s()
            if due_s is not None:
                timeout_s = min(timeout_s, due_s - now)
        return max(0.0, timeout_s)

    @staticmethod
    def _has_work(station: Station, now: float) -> bool:
        endpoint: Endpoint = station.endpoint
        return any(
            not conduit.is_drained
            or bool(conduit.incoming)
            or (not conduit.is_blocked and endpoint.has_datagrams(conduit.number, now))
            for conduit in station.conduits.values()
        )

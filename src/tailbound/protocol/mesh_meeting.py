"""How the ranks of a mesh meet, gather bytes and part: all but the rounds.

Of two ranks the higher one connects. Both say hello, check UDP both ways, and tell all
others when all their links work; a rank that has heard so from all others starts.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from tailbound.config import LossBound
from tailbound.errors import (
    HandshakeError,
    PeerLostError,
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
    WireError,
)
from tailbound.protocol.accepting import AcceptingEndpoint
from tailbound.protocol.events import Ended, Gathered, Started, peer_name
from tailbound.protocol.gather import Gather, cut_pieces
from tailbound.protocol.link import Link
from tailbound.protocol.mesh_checks import check_ready_untrusted, compare_hellos
from tailbound.protocol.messages import (
    Bye,
    GatherPart,
    Mark,
    MeshHello,
    Message,
    Probe,
    Ready,
    Refuse,
)
from tailbound.protocol.plan import Limits
from tailbound.protocol.session import (
    LinkState,
    UdpCheck,
    next_state,
    ping_sizes,
)
from tailbound.protocol.wire import (
    HEADER_BYTES,
    VERSION,
    datagram_bytes,
)

MAX_EARLY = 4096
"""Messages, for each rank, that may wait for our start: a rank that has started
announces a step's rounds at most, and a goodbye."""


class MeshMember(AcceptingEndpoint):
    """A rank with a link to every other one, before, between and after the rounds."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        session: int,
        bound: LossBound,
        *,
        now: float,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        super().__init__(rank)
        self.session, self.world_size, self.bound = session, world_size, bound
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._join_deadline_s = now + timeout_s
        self._by_rank: dict[int, int] = {}
        """Number of the link to each rank that said hello."""
        self._ready: dict[int, Ready] = {}
        self._early: list[tuple[int, Message]] = []
        """What came from ranks that have started while this one has not."""
        self._has_started = False
        self._gather = Gather(world_size)
        self._gather_s: float | None = None
        self._parted: set[int] = set()
        """Ranks whose goodbye, or the end of whose connection, was seen."""
        self._is_closing = False

    # -- what a mesh's rounds decide ----------------------------------------------

    @abstractmethod
    def _begin_rounds(self, room_bytes: int, limits: Limits) -> None:
        """All ranks are ready."""

    @abstractmethod
    def _handle_round(self, link: int, message: Message, now: float) -> None:
        """Take in an announcement of a round."""

    @abstractmethod
    def _awaited_in_rounds(self) -> Iterable[int]:
        """Ranks that have not begun a round that this rank is in."""

    # -- meeting --------------------------------------------------------------------

    def connect(self, number: int, link: Link, peer: int) -> None:
        """The TCP connection to a lower rank is there; introduce ourselves."""
        link.peer_rank, link.name = peer, peer_name(peer)
        self.links[number] = link
        self._by_rank[peer] = number
        link.control.append(self._hello(link))

    def _hello(self, link: Link) -> MeshHello:
        return MeshHello(
            VERSION,
            self.rank,
            self.world_size,
            sys.byteorder,
            self.session,
            self.bound,
            link.mtu,
            link.udp_port,
            link.window_bytes,
        )

    @property
    def _first_message(self) -> type[MeshHello]:
        return MeshHello

    def _welcome(self, link: int, hello: Any, now: float) -> None:
        state = self.links[link]
        refusal = compare_hellos(self._hello(state), hello)
        if refusal is None and (hello.rank <= self.rank or hello.rank in self._by_rank):
            refusal = Refuse(
                "rank",
                f"{hello.rank} is taken ({peer_name(self.rank)})",
                f"{hello.rank} of {hello.world_size}",
                "give every process its own RANK",
            )
        if refusal is not None and (self._has_started or refusal.field == "session"):
            state.control.append(refusal)  # a stray process does not end a job
            return
        if refusal is not None:
            self._refuse(link, refusal)
            return
        state.peer_rank, state.name = hello.rank, peer_name(hello.rank)
        self._by_rank[hello.rank] = link
        state.control.append(self._hello(state))
        self._check_udp(state, hello, now)

    def _check_udp(self, state: Link, hello: MeshHello, now: float) -> None:
        state.state = next_state(state.state, "agreed", peer=state.name)
        state.peer_udp_port = hello.udp_port
        state.window_bytes = min(state.window_bytes, hello.window_bytes)
        largest = datagram_bytes(min(state.mtu, hello.mtu), state.ip_version)
        state.check = UdpCheck(
            session=self.session,
            rank=self.rank,
            sizes=ping_sizes(largest),
            peer=state.name,
            address=f"{state.address} port {hello.udp_port}",
            now=now,
            timeout_s=self._timeout_s,
        )

    def _try_start(self, now: float) -> None:
        """Say that all links work once they do; start once all ranks said so."""
        if self._has_started or len(self._by_rank) < self.world_size - 1:
            return
        links = [self.links[number] for number in self._by_rank.values()]
        if self.rank not in self._ready:
            sizes = [
                link.check.settled_bytes(now) if link.check is not None else None
                for link in links
            ]
            known = [size for size in sizes if size is not None]
            if len(known) < len(links):
                return
            ready = Ready(
                min(known) - HEADER_BYTES, min(link.window_bytes for link in links)
            )
            self._ready[self.rank] = ready
            for link in links:
                link.control.append(ready)
        if len(self._ready) < self.world_size:
            return
        self._has_started = True
        for number in [n for n in self.links if n not in self._by_rank.values()]:
            self._drop(number)
        for link in links:
            link.state = next_state(link.state, "start", peer=link.name)
        room_bytes = min(ready.payload_bytes for ready in self._ready.values())
        window = min(ready.window_bytes for ready in self._ready.values())
        limits = Limits(window, self._timeout_s, self._silence_s)
        self._begin_rounds(room_bytes, limits)
        self._events.append(Started(self.world_size, room_bytes))
        early, self._early = self._early, []
        for number, message in early:
            self._take_message(number, message, now)

    # -- bytes, and goodbye ------------------------------------------------------

    def all_gather(self, data: bytes, now: float) -> None:
        """Give this rank's bytes; all ranks' come back as a Gathered event."""
        self._gather_s = now
        for piece in cut_pieces(self.rank, data):
            self._gather.receive_untrusted(piece)
            for link in self.links.values():
                link.control.append(piece)
        self._check_all_stay()
        self._pop_gathered()

    def _pop_gathered(self) -> None:
        if self._gather_s is not None and (parts := self._gather.pop()) is not None:
            self._gather_s = None
            self._events.append(Gathered(parts))

    def close(self) -> None:
        """Say goodbye; every peer's answer makes an Ended event.

        Only then may the connections be closed: closing with bytes unread resets them,
        and a reset can overtake the goodbye.
        """
        if self.error is not None or self._is_closing:
            return
        self._is_closing = True
        for link in self.links.values():
            if link.state is LinkState.RUNNING:
                link.state = next_state(link.state, "bye", peer=link.name)
                link.control.append(Bye())
        self._note_parted()

    def lose_link(self, link: int, reason: str, now: float) -> None:
        """See Endpoint; who has said goodbye need not wait for an answer any more."""
        state = self.links.get(link)
        if self.error is None and state is not None and state.state is LinkState.CLOSED:
            self._note_parted(state.peer_rank)
        super().lose_link(link, reason, now)

    def _note_parted(self, rank: int | None = None) -> None:
        if rank is not None:
            self._parted.add(rank)
        if self._is_closing and len(self._parted) == self.world_size - 1:
            self._is_closing = False
            self._events.append(Ended())

    def _check_all_stay(self) -> None:
        """What a departed rank would have to join can never end.

        A rank may leave while others still wait for third ones: what it owed them was
        on its way before its goodbye.
        """
        awaited = {*self._awaited_in_rounds()}
        if self._gather_s is not None:
            awaited.update(self._gather.late_ranks)
        gone = sorted(awaited & self._parted)
        if gone:
            names = tuple(peer_name(rank) for rank in gone)
            self.fail(PeerLostError(names, self._phase(), "left while others go on"))

    # -- control messages and time ----------------------------------------------------

    def _dispatch(self, link: int, message: Message, now: float) -> None:
        if not self._has_started and isinstance(message, Mark | Probe):
            # Of a rank that has started: it waits behind its announcement.
            self._handle(link, message, now)
        else:
            super()._dispatch(link, message, now)

    def _handle(self, link: int, message: Message, now: float) -> None:
        state = self.links[link]
        match message:
            case MeshHello() if state.state is LinkState.CONNECTED:
                refusal = compare_hellos(self._hello(state), message)
                if refusal is None and message.rank != state.peer_rank:
                    raise WireError(f"rank {message.rank} where {state.name} was")
                if refusal is not None:
                    self._refuse(link, refusal)
                    return
                self._check_udp(state, message, now)
            case Refuse():
                self.fail(
                    HandshakeError(
                        message.field, message.ours, message.theirs, message.remedy
                    )
                )
            case Ready() if state.peer_rank not in self._ready:
                check_ready_untrusted(message)
                self._ready[state.peer_rank] = message
            case GatherPart():
                if message.rank != state.peer_rank:
                    raise WireError(f"a gather part of rank {message.rank}")
                self._gather.receive_untrusted(message)
                self._pop_gathered()
            case Bye() if state.state is LinkState.CLOSED:
                self._note_parted(state.peer_rank)
            case Bye() if self._has_started:
                state.state = next_state(state.state, "bye", peer=state.name)
                state.control.append(Bye())
                self._note_parted(state.peer_rank)
                self._check_all_stay()
            case _ if not self._has_started:
                if len(self._early) >= MAX_EARLY * self.world_size:
                    raise PeerProtocolError(state.name, self._phase(), "a flood")
                self._early.append((link, message))
            case MeshHello() | Ready():
                raise PeerProtocolError(
                    state.name, self._phase(), type(message).__name__
                )
            case _:
                self._handle_round(link, message, now)

    def _meeting_timers(self) -> list[float]:
        times = self._ping_timers()
        if not self._has_started:
            times.append(self._join_deadline_s)
        if self._gather_s is not None:
            times.append(self._gather_s + self._timeout_s)
        return times

    def _handle_meeting_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the job, if a deadline has passed."""
        self._queue_pings(now)
        self._try_start(now)
        if not self._has_started and now >= self._join_deadline_s:
            here = self._ready if len(self._by_rank) == self.world_size - 1 else None
            present = {self.rank, *(self._by_rank if here is None else here)}
            absent = [rank for rank in range(self.world_size) if rank not in present]
            names = tuple(peer_name(rank) for rank in absent)
            return PeerLostError(names, "start-up", "did not join before the deadline")
        if self._gather_s is not None and now >= self._gather_s + self._timeout_s:
            late = ", ".join(peer_name(rank) for rank in self._gather.late_ranks)
            return RoundTimeoutError(late, "an all-gather", 0, 0, now - self._gather_s)
        return None

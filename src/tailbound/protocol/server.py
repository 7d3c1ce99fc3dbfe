"""The server's endpoint: one link per worker (DBLP, Algorithm 3)."""

import math
from collections.abc import Sequence

from tailbound.config import LossBound
from tailbound.errors import (
    PeerLostError,
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
    WireError,
)
from tailbound.protocol.accepting import AcceptingEndpoint
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import (
    SERVER_RANK,
    Ended,
    RoundKey,
    Started,
    peer_name,
)
from tailbound.protocol.gather import GatherWatch
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Begin,
    Bye,
    GatherPart,
    Hello,
    Message,
    Start,
    Welcome,
)
from tailbound.protocol.plan import Limits, Plan
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.sender import Sender
from tailbound.protocol.server_rounds import ServerRounds
from tailbound.protocol.session import (
    LinkState,
    UdpCheck,
    check_hello,
    find_mismatch,
    next_state,
    ping_sizes,
)
from tailbound.protocol.wire import HEADER_BYTES, datagram_bytes
from tailbound.reduction import FORMATS, WireFormat


class ServerEndpoint(AcceptingEndpoint):
    """Accepts the workers, then reduces round after round until all say goodbye."""

    def __init__(
        self,
        world_size: int,
        session: int,
        *,
        now: float,
        timeout_s: float,
        silence_s: float,
        join_timeout_s: float | None = None,
        first_counter: int = 1,
    ) -> None:
        super().__init__(SERVER_RANK)
        self.session = session
        self.plan: Plan | None = None
        """What all ranks agreed on; None before the start."""
        self.world_size = world_size
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._join_deadline_s = now + (join_timeout_s or timeout_s)
        self._first_counter = first_counter
        self._hellos: dict[int, Hello] = {}
        self._rounds: ServerRounds | None = None
        self._gathers = GatherWatch(world_size)
        self._mean_due_s: float | None = None
        self._ended = False

    @property
    def bound(self) -> LossBound | None:
        """The bound that the workers brought along; None before the first hello."""
        hello = next(iter(self._hellos.values()), None)
        return None if hello is None else hello.bound

    @property
    def _first_message(self) -> type[Hello]:
        return Hello

    def settle(self, now: float) -> None:
        """See Endpoint."""
        if self.error is not None or not self._is_touched:
            return
        self._is_touched = False
        if self._rounds is None:
            self._try_start(now)
            return
        open_ranks = self._rounds.open_ranks
        for number, state in self.links.items():
            if state.peer_rank in open_ranks:
                receiver = self._rounds.arrival(state.peer_rank, now)
                receiver.settle(now)
                self._collect(number, receiver)
        if self._mean_due_s is None and self._rounds.is_all_in:
            # For the next turn: the stops must leave before a large bucket's division.
            self._mean_due_s = math.nextafter(now, math.inf)

    def timer(self) -> float | None:
        """See Endpoint."""
        if self.error is not None or self._ended:
            return None
        times = self._ping_timers()
        if self._mean_due_s is not None:
            times.append(self._mean_due_s)
        if self._rounds is None and len(self._hellos) < self.world_size:
            times.append(self._join_deadline_s)
        if self._gathers.opened_s is not None:
            times.append(self._gathers.opened_s + self._timeout_s)
        if self._rounds is not None and (time := self._rounds.timer()) is not None:
            times.append(time)
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """See Endpoint."""
        if self.error is not None or self._ended:
            return
        self._queue_pings(now)
        if self._rounds is not None:
            self._is_touched = True  # a gradient's deadline may have passed
            self._take_mean(self._rounds, now)
            error = self._rounds.handle_timer(now) or self._late_gather(now)
            if error is not None:
                self.fail(error)
        elif now >= self._join_deadline_s and len(self._hellos) < self.world_size:
            self.fail(self._not_all_here())
        else:
            self._try_start(now)

    def _take_mean(self, rounds: ServerRounds, now: float) -> None:
        if self._mean_due_s is None or now < self._mean_due_s:
            return
        self._mean_due_s = None
        mean = rounds.try_finish(now)
        assert mean is not None  # what is in stays in
        for state in self._workers():
            state.control.append(mean)

    def _late_gather(self, now: float) -> TailboundError | None:
        opened_s = self._gathers.opened_s
        if opened_s is None or now < opened_s + self._timeout_s:
            return None
        names = ", ".join(peer_name(rank) for rank in self._gathers.late_ranks)
        return RoundTimeoutError(names, "an all-gather", 0, 0, now - opened_s)

    def _not_all_here(self) -> TailboundError:
        here = {hello.rank for hello in self._hellos.values()}
        missing = [rank for rank in range(self.world_size) if rank not in here]
        names = tuple(peer_name(rank) for rank in missing)
        return PeerLostError(names, "start-up", "did not join before the deadline")

    def _senders(self, link: int) -> Sequence[tuple[Sender, BucketBytes]]:
        if self._rounds is None:
            return ()
        return self._rounds.senders(self.links[link].peer_rank)

    def _find_round(
        self, link: int, kind: int, bucket: int, counter: int
    ) -> RoundKey | None:
        if self._rounds is None:
            return None
        return self._rounds.key.if_named(kind, bucket, counter)

    def _layout(self, link: int, key: RoundKey) -> ChunkLayout:
        assert self._rounds is not None  # the key is theirs
        return self._rounds.layout

    def _receiver(
        self, link: int, key: RoundKey, now: float
    ) -> tuple[Receiver, WireFormat]:
        assert self._rounds is not None  # the key is theirs
        spec = self._rounds.plan.buckets[key.bucket]
        receiver = self._rounds.arrival(self.links[link].peer_rank, now)
        return receiver, FORMATS[spec.dtype]

    def _handle(self, link: int, message: Message, now: float) -> None:
        state = self.links[link]
        match message:
            case Begin() if self._rounds is not None:
                key = self._rounds.key
                if (message.counter, message.bucket) != (key.counter, key.bucket):
                    raise PeerProtocolError(
                        state.name,
                        f"in round {key.counter}, bucket {key.bucket}",
                        f"round {message.counter}, bucket {message.bucket}",
                    )
                self._rounds.begin(state.peer_rank, message, now)
                self._check_all_stay()
            case GatherPart():
                if message.rank != state.peer_rank:
                    raise WireError(f"a gather part of rank {message.rank}")
                self._gathers.receive_untrusted(message, now)
                self._check_all_stay()
                for other in self._workers():
                    other.control.append(message)
            case Bye():
                state.state = next_state(state.state, "bye", peer=state.name)
                state.control.append(Bye())
                if all(s.state is LinkState.CLOSED for s in self._workers()):
                    self._ended = True
                    self._events.append(Ended())
                else:
                    self._check_all_stay()
            case _:
                raise PeerProtocolError(
                    state.name, self._phase(), type(message).__name__
                )

    def _workers(self) -> list[Link]:
        """The links that said hello; a stranger may connect at any time."""
        return [self.links[number] for number in self._hellos]

    def _check_all_stay(self) -> None:
        """What a departed worker would have to join can never end."""
        is_round_open = self._rounds is not None and self._rounds.open_ranks
        if not is_round_open and self._gathers.opened_s is None:
            return
        gone = tuple(
            state.name
            for state in self.links.values()
            if state.state is LinkState.CLOSED
        )
        if gone:
            self.fail(PeerLostError(gone, self._phase(), "left while others go on"))

    def _welcome(self, link: int, hello: Hello, now: float) -> None:
        state = self.links[link]
        taken = [other.rank for other in self._hellos.values()]
        refusal = check_hello(hello, world_size=self.world_size, taken=taken)
        first = next(iter(self._hellos.values()), None)
        if refusal is None and first is not None:
            refusal = find_mismatch(first, hello)
        if refusal is not None and self._rounds is not None:
            state.control.append(refusal)  # a stray worker does not end a running job
            return
        if refusal is not None:
            self._refuse(link, refusal)
            return
        self._hellos[link] = hello
        state.peer_rank, state.name = hello.rank, peer_name(hello.rank)
        state.peer_udp_port = hello.udp_port
        if len(self._hellos) < self.world_size:
            return
        largest = min(
            datagram_bytes(
                min(self.links[number].mtu, other.mtu), self.links[number].ip_version
            )
            for number, other in self._hellos.items()
        )
        sizes = ping_sizes(largest)
        for number in self._hellos:
            self._check_udp(self.links[number], sizes, now)

    def _check_udp(self, state: Link, sizes: tuple[int, ...], now: float) -> None:
        state.state = next_state(state.state, "agreed", peer=state.name)
        state.control.append(Welcome(self.session, state.udp_port, sizes))
        state.check = UdpCheck(
            session=self.session,
            rank=SERVER_RANK,
            sizes=sizes,
            peer=state.name,
            address=f"{state.address} port {state.peer_udp_port}",
            now=now,
            timeout_s=self._timeout_s,
        )

    def _try_start(self, now: float) -> None:
        """Start when every link's UDP works both ways."""
        if len(self._hellos) < self.world_size:
            return
        settled = [
            state.check.settled_bytes(now) if state.check is not None else None
            for number, state in self.links.items()
            if number in self._hellos
        ]
        sizes = [size for size in settled if size is not None]
        if len(sizes) < self.world_size:
            return
        room = min(sizes) - HEADER_BYTES
        window = min(
            min(self.links[number].window_bytes, hello.window_bytes)
            for number, hello in self._hellos.items()
        )
        first = next(iter(self._hellos.values()))
        self.plan = Plan(
            first.buckets,
            first.bound,
            room,
            self.world_size,
            Limits(window, self._timeout_s, self._silence_s),
            self._first_counter,
        )
        try:
            self._rounds = ServerRounds(self.plan)
        except MemoryError:
            self.fail(
                TailboundError(
                    "the server has no memory for a sum of all gradients; "
                    "run it on a larger machine"
                )
            )
            return
        for number in list(self.links):
            if number not in self._hellos:
                self._drop(number)
        for state in self.links.values():
            state.state = next_state(state.state, "start", peer=state.name)
            state.control.append(Start(room, window))
        self._events.append(Started(self.world_size, room))

    def _phase(self) -> str:
        if self._rounds is None:
            return "start-up"
        return self._rounds.key.describe()

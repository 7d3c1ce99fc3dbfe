"""An endpoint that others connect to: who comes, and who is a stranger."""

from abc import abstractmethod
from typing import Any

from tailbound.errors import HandshakeError, WireError
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.link import Link
from tailbound.protocol.messages import Refuse


class AcceptingEndpoint(Endpoint):
    """Takes connections in; a stranger that talks nonsense costs only its own link."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.dropped: list[int] = []
        """Links that the I/O side must close: they were no ranks of this job."""

    @property
    @abstractmethod
    def _first_message(self) -> type[Any]:
        """What a connection must begin with."""

    @abstractmethod
    def _welcome(self, link: int, hello: Any, now: float) -> None:
        """Take in the first message of a link; sets its peer's rank if it may stay."""

    def accept(self, number: int, link: Link) -> None:
        """A TCP connection came in; its first message must be a hello."""
        self.links[number] = link

    def receive_control(self, link: int, data: bytes | memoryview, now: float) -> None:
        """See Endpoint."""
        state = self.links.get(link)
        if state is None or self.error is not None:
            return
        if state.peer_rank < 0:
            try:
                message = next(state.reader.feed_untrusted(data), None)
            except WireError:
                self._drop(link)
                return
            if message is None:
                return
            if not isinstance(message, self._first_message):
                self._drop(link)
                return
            self._welcome(link, message, now)
            data = b""  # what followed the hello waits in the reader
        if state.peer_rank >= 0:
            super().receive_control(link, data, now)

    def lose_link(self, link: int, reason: str, now: float) -> None:
        """See Endpoint."""
        state = self.links.get(link)
        if state is None:
            return
        if state.peer_rank < 0:
            self._drop(link)
        else:
            super().lose_link(link, reason, now)

    def _refuse(self, link: int, refusal: Refuse) -> None:
        """Say no to a rank of this job, which ends it."""
        self.links[link].control.append(refusal)
        self.fail(
            HandshakeError(refusal.field, refusal.ours, refusal.theirs, refusal.remedy)
        )

    def _drop(self, link: int) -> None:
        del self.links[link]
        self.dropped.append(link)

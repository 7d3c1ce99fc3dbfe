"""Meet in a store that may hold what earlier attempts of the same job left there.

torchrun keeps one store over all restarts, and its count of restarts can differ from
host to host: one that restarts because others came back does not count. So a rank
believes nothing but what answers its own words (docs/design/0029)::

    rank 0   KEY = a session, drawn now
    others   KEY/SESSION/RANK = a token, drawn now, and our address
    rank 0   KEY/SESSION/all = all of these
    others   take it if it holds their own token; else the session was an old one's,
             and rank 0 will replace it
"""

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from tailbound.errors import PeerLostError
from tailbound.protocol.events import peer_name
from tailbound.transport.mesh import Meeting

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
"""Between two looks into the store: it serves all ranks, and a wait inside it would
block every other thread that uses the same client."""


def meet_in(
    store: Store,
    key: str,
    rank: int,
    world_size: int,
    address: str,
    *,
    timeout_s: float,
) -> Meeting:
    """Tell the other ranks where we are, and learn where they are.

    Args:
        store: the same on all ranks.
        key: names the meeting; one after the other may have the same name.
        rank: this process.
        world_size: ranks that meet.
        address: ours.
        timeout_s: longest wait for the others.

    Raises:
        PeerLostError: the store ended, or a rank did not come in time; names it.
    """
    token = secrets.token_hex(8)
    deadline_s = time.monotonic() + timeout_s
    try:
        if rank:
            session, entries = _answer(store, key, rank, token, address, deadline_s)
        else:
            session = str(secrets.randbits(63))
            store.set(key, session)
            places = [f"{key}/{session}/{other}" for other in range(1, world_size)]
            _wait(lambda: bool(store.check(places)), deadline_s)
            answers = [json.loads(store.get(place)) for place in places]
            entries = [[token, address], *answers]
            store.set(f"{key}/{session}/all", json.dumps(entries))
    except TimeoutError as error:
        raise PeerLostError(
            _late(store, key, rank, world_size),
            "start-up",
            f"published no address within {timeout_s:.0f} s; did it get to the same "
            "call?",
        ) from error
    except RuntimeError as error:
        host = "the job's store, which torchrun or rank 0 hosts,"
        raise PeerLostError((host,), "start-up", first_line(error)) from error
    return Meeting(int(session), tuple(entry[1] for entry in entries))


def first_line(error: Exception) -> str:
    """What torch's errors say before they list the frames."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _answer(
    store: Store, key: str, rank: int, token: str, address: str, deadline_s: float
) -> tuple[str, list[Any]]:
    """The session and all entries; for every rank but 0."""
    session = ""
    entries: list[Any] = []

    def is_met() -> bool:
        nonlocal session, entries
        if not store.check([key]):
            return False
        newest = store.get(key).decode()
        if newest != session:
            session = newest
            store.set(f"{key}/{session}/{rank}", json.dumps([token, address]))
        if not store.check([f"{key}/{session}/all"]):
            return False
        entries = json.loads(store.get(f"{key}/{session}/all"))
        return len(entries) > rank and entries[rank][0] == token

    _wait(is_met, deadline_s)
    return session, entries


def _wait(is_there: Callable[[], bool], deadline_s: float) -> None:
    pause_s = FIRST_PAUSE_S
    while not is_there():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)


def _late(store: Store, key: str, rank: int, world_size: int) -> tuple[str, ...]:
    """Who has not answered rank 0; rank 0 itself if it is not that."""
    absent: list[int] = []
    try:
        session = store.get(key).decode() if store.check([key]) else None
        if session is not None:
            absent = [
                other
                for other in range(1, world_size)
                if other != rank and not store.check([f"{key}/{session}/{other}"])
            ]
    except RuntimeError:
        pass
    return tuple(peer_name(other) for other in absent or [0])

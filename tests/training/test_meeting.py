"""Meeting in a store that remembers earlier attempts."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store

from tailbound.errors import PeerLostError
from tailbound.training.meeting import meet_in
from tailbound.transport.mesh import Meeting


def meet_all(store: Store, names: list[str]) -> list[Meeting]:
    """All ranks as threads, the last first."""
    num = len(names)
    with ThreadPoolExecutor(num) as pool:
        futures = [
            pool.submit(meet_in, store, "key", rank, num, names[rank], timeout_s=20.0)
            for rank in reversed(range(num))
        ]
        return [future.result() for future in reversed(futures)]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HashStore(),
        lambda path: PrefixStore("job", HashStore()),
        lambda path: FileStore(str(path / "store"), 3),
    ],
    ids=["hash", "prefix", "file"],
)
def test_all_ranks_learn_all_addresses_and_one_session(
    make: Callable[[Path], Store], tmp_path: Path
) -> None:
    met = meet_all(make(tmp_path), ["10.0.0.1:1", "[fd00::2]:2", "10.0.0.3:3"])

    assert {one.addresses for one in met} == {
        ("10.0.0.1:1", "[fd00::2]:2", "10.0.0.3:3")
    }
    (session,) = {one.session for one in met}
    assert 0 <= session < 1 << 63


def test_a_restart_with_the_same_words_meets_anew() -> None:
    """Also with fewer ranks, as after a host was lost."""
    store = HashStore()
    attempts = [["a:1", "a:2", "a:3"], ["b:1", "b:2", "b:3"], ["c:1", "c:2"]]

    met = [meet_all(store, names)[-1] for names in attempts]

    assert [list(one.addresses) for one in met] == attempts
    assert len({one.session for one in met}) == 3


def test_a_rank_that_comes_before_rank_0_waits_for_its_word() -> None:
    """It answers the session of the attempt before, and is not content with that."""
    store = HashStore()
    meet_all(store, ["a:1", "a:2"])
    old = store.get("key").decode()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet_in, store, "key", 1, 2, "b:2", timeout_s=20.0)
        while "b:2" not in store.get(f"key/{old}/1").decode():
            pass
        assert json.loads(store.get(f"key/{old}/all"))[1][1] == "a:2"
        late = meet_in(store, "key", 0, 2, "b:1", timeout_s=20.0)

    assert early.result() == late
    assert late.addresses == ("b:1", "b:2")


@pytest.mark.parametrize(
    ("rank", "answered", "named"),
    [
        (0, [], ("rank 1", "rank 2")),
        (0, [2], ("rank 1",)),
        (1, None, ("rank 0",)),
        (1, [], ("rank 2",)),
        (1, [2], ("rank 0",)),
    ],
)
def test_who_does_not_come_is_named(
    rank: int, answered: list[int] | None, named: tuple[str, ...]
) -> None:
    """Rank 0's word is there unless ``answered`` is None."""
    store = KeepsSession() if rank == 0 else HashStore()
    if answered is not None:
        store.set("key", "7")
        for other in answered:
            store.set(f"key/7/{other}", json.dumps(["t", "a:1"]))

    with pytest.raises(PeerLostError, match="published no address within 0 s") as lost:
        meet_in(store, "key", rank, 3, "b:1", timeout_s=0.05)

    assert lost.value.peers == named


class KeepsSession(HashStore):
    """Rank 0's own session is 7, so that a test can answer it before."""

    def set(self, key: str, value: str) -> None:
        """See Store."""
        super().set(key, "7" if key == "key" else value)


class Ends(HashStore):
    """A store whose host goes away after a while."""

    def __init__(self, num_checks: int) -> None:
        super().__init__()
        self._left = num_checks

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("Connection reset by peer\nframe #0: ...")
        return bool(super().check(keys))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_ends_is_named(rank: int) -> None:
    with pytest.raises(PeerLostError) as lost:
        meet_in(Ends(1), "key", rank, 2, "b:1", timeout_s=20.0)

    assert str(lost.value) == (
        "lost the job's store, which torchrun or rank 0 hosts, during start-up "
        "(Connection reset by peer); see that process's own output, then restart the "
        "job"
    )


class Forgets(HashStore):
    """A store that ends when it is asked for rank 0's word."""

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        if keys == ["key"]:
            raise RuntimeError("Connection reset by peer")
        return bool(super().check(keys))


def test_a_store_that_ends_while_the_late_are_looked_for_hides_no_error() -> None:
    with pytest.raises(PeerLostError, match="published no address"):
        meet_in(Forgets(), "key", 0, 2, "b:1", timeout_s=0.05)

"""A sampler that knows which samples were dropped, and brings them back.

An epoch is one or more passes over the loader. The first is that of
``DistributedSampler``: each rank has its part of one permutation. The job says of each
step which samples were used. Those that were dropped are pooled over the ranks, shared
out evenly, and make up the next pass, until every sample was used or a pass has
brought no rank any further.
Source: DropCompute, section:dropped_samples_compensation; spec C6; FIELD A15.
"""

from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from tailbound.errors import ConfigError
from tailbound.training.exchange import AllGather
from tailbound.training.rendezvous import find_place

MAX_PASSES = 20
"""Of an epoch. At 10 % drop a million samples are down to one after six; who needs
more drops nearly everything."""


class ResamplingSampler(Sampler[int]):
    """Gives a rank its indices, and takes note of those that were dropped.

    Give it to ``DataLoader(sampler=...)``, with any ``num_workers``, and loop over
    ``job.epoch(loader)``. Call ``set_epoch`` before each epoch.

    Args:
        dataset: what is sampled, or its length.
        num_replicas: ranks; None: those of the job.
        rank: this process; None: as the job says.
        shuffle: in an order that epoch and seed decide; False: in the dataset's.
        seed: the same on every rank.
        drop_last: leave out the tail that does not divide evenly; False: some samples
            are given to two ranks, so that all have equally many.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        place = find_place() if num_replicas is None or rank is None else None
        if num_replicas is None:
            num_replicas = place.world_size if place else 1
        if rank is None:
            rank = place.rank if place else 0
        num_samples = dataset if isinstance(dataset, int) else len(dataset)
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"rank is 0 to {num_replicas - 1}, not {rank}")
        if num_samples < (num_replicas if drop_last else 1):
            raise ConfigError(
                f"{num_samples} samples are too few for {num_replicas} ranks"
            )
        self._num_samples, self._num_replicas = num_samples, num_replicas
        self._rank, self._shuffle = rank, shuffle
        self._seed, self._drop_last = seed, drop_last
        self._epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the same one again changes nothing.

        Args:
            epoch: 0 or more; decides the order, equally on all ranks.
        """
        if epoch == self._epoch:
            return
        self._epoch, self._pass = epoch, 0
        self._indices, self._is_copy = self._first_pass()
        self._used = self._start = 0
        self._issued: deque[int] = deque()
        self._dropped: list[int] = []

    def _first_pass(self) -> tuple[list[int], list[bool]]:
        """This rank's part, and which of it another rank has too."""
        order = np.arange(self._num_samples)
        if self._shuffle:
            rng = np.random.default_rng([self._seed, self._epoch])
            order = rng.permutation(self._num_samples)
        share, rest = divmod(self._num_samples, self._num_replicas)
        if rest and not self._drop_last:
            share += 1
        places = np.arange(share) * self._num_replicas + self._rank
        indices = order[places % self._num_samples]
        return indices.tolist(), (places >= self._num_samples).tolist()

    def __len__(self) -> int:
        """Samples that the iteration under way, or else the next one, gives."""
        return len(self._indices) - self._start

    def __iter__(self) -> Iterator[int]:
        """Give the indices of this pass; what was acknowledged is not given again."""
        self._start = self._used
        # A pass that was left before its end: what was not acknowledged comes again.
        self._issued.clear()
        for place in range(self._start, len(self._indices)):
            self._issued.append(place)
            yield self._indices[place]

    def acknowledge(self, num_samples: int, num_used: int) -> None:
        """Say what became of the oldest samples that were given out.

        Args:
            num_samples: of a step's batch.
            num_used: those at its front that are in the gradient.

        Raises:
            ConfigError: so many were not given out.
        """
        if not 0 <= num_used <= num_samples <= len(self._issued):
            raise ConfigError(
                f"{num_used} of {num_samples} samples used, of {len(self._issued)} "
                "that were given out: does each step take one whole batch?"
            )
        for number in range(num_samples):
            place = self._issued.popleft()
            self._used = place + 1
            if number >= num_used and not self._is_copy[place]:
                self._dropped.append(self._indices[place])

    @property
    def unused(self) -> tuple[int, ...]:
        """Samples of this epoch that this rank was given and did not use.

        What another rank was given too, to fill up its share, is not among them.
        """
        return tuple(self._dropped)

    def begin_redo(self, all_gather: AllGather) -> bool:
        """End a pass, and begin another with the samples that all ranks dropped.

        Args:
            all_gather: exchanges bytes with all ranks, which call this together.

        Returns:
            False if none was dropped anywhere, and on the last pass: the epoch is over.
        """
        left = [
            self._indices[place]
            for place in range(self._used, len(self._indices))
            if not self._is_copy[place]
        ]
        # A loader with drop_last leaves samples at the end that no step ever saw.
        self._dropped += left
        self._used = len(self._indices)
        self._issued.clear()
        mine = np.array(self._dropped, dtype="<i8").tobytes()
        pool = np.concatenate(
            [np.frombuffer(part, "<i8") for part in all_gather(mine)]
        ).tolist()
        if not pool or self._pass + 1 >= MAX_PASSES:
            return False
        self._pass += 1
        share = -(-len(pool) // self._num_replicas)
        places = range(self._rank, share * self._num_replicas, self._num_replicas)
        self._indices = [pool[place % len(pool)] for place in places]
        self._is_copy = [place >= len(pool) for place in places]
        self._used, self._start, self._dropped = 0, 0, []
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain data that a run resumes from, in the middle of an epoch too."""
        return {
            "epoch": self._epoch,
            "pass": self._pass,
            "num_replicas": self._num_replicas,
            "num_samples": self._num_samples,
            "seed": self._seed,
            "indices": list(self._indices),
            "is_copy": list(self._is_copy),
            "used": self._used,
            "dropped": list(self._dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with as many ranks.

        Raises:
            ConfigError: it is of another number of ranks or samples.
        """
        for name, ours, remedy in (
            ("num_replicas", self._num_replicas, "start at an epoch's beginning"),
            ("num_samples", self._num_samples, "load the same dataset"),
        ):
            if state[name] != ours:
                raise ConfigError(
                    f"the sampler's state has {name}={state[name]}, here it is {ours}; "
                    f"{remedy}"
                )
        self._epoch, self._pass = state["epoch"], state["pass"]
        self._seed = state["seed"]
        self._indices, self._is_copy = list(state["indices"]), list(state["is_copy"])
        self._used = self._start = state["used"]
        self._dropped = list(state["dropped"])
        self._issued = deque()


def resampled_batches(
    loader: DataLoader[Any], sampler: ResamplingSampler, all_gather: AllGather
) -> Iterator[Any]:
    """Give the loader's batches, pass after pass, until every sample was used.

    All ranks get equally many. What is left after ``MAX_PASSES`` is ``unused``.

    Args:
        loader: of this sampler.
        sampler: told of each batch's samples before the next batch is asked for.
        all_gather: exchanges bytes with all ranks.
    """
    while True:
        yield from loader
        if not sampler.begin_redo(all_gather):
            return

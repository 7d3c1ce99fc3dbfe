"""A sampler that knows which samples were dropped, and brings them back.

An epoch is one or more passes over the loader. The first is that of
``DistributedSampler``: each rank has its part of one permutation. The job says of each
step which samples were used. Those that were dropped are pooled over the ranks, shared
out evenly, and make up the next pass, until every sample was used or a pass has
brought no rank any further.
Source: DropCompute, section:dropped_samples_compensation; spec C6; FIELD A15.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
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
        self._indices, self._is_copy = self._first_pass(self._rank, self._num_replicas)
        self._used = self._start = 0
        self._issued: deque[int] = deque()
        self._dropped: list[int] = []

    @property
    def epoch(self) -> int:
        """The one under way, as ``set_epoch`` was told."""
        return self._epoch

    def _first_pass(self, rank: int, num_replicas: int) -> tuple[list[int], list[bool]]:
        """A rank's part of an epoch, and which of it another rank has too."""
        order = np.arange(self._num_samples)
        if self._shuffle:
            rng = np.random.default_rng([self._seed, self._epoch])
            order = rng.permutation(self._num_samples)
        share, rest = divmod(self._num_samples, num_replicas)
        if rest and not self._drop_last:
            share += 1
        places = np.arange(share) * num_replicas + rank
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
        self._share_out(pool)
        self._dropped = []
        return True

    def _share_out(self, pool: list[int]) -> None:
        """Begin a pass with these samples of all ranks, evenly."""
        self._pass += 1
        share = -(-len(pool) // self._num_replicas)
        places = range(self._rank, share * self._num_replicas, self._num_replicas)
        self._indices = [pool[place % len(pool)] for place in places]
        self._is_copy = [place >= len(pool) for place in places]
        self._used = self._start = 0
        self._issued.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain data that a run resumes from, in the middle of an epoch too.

        The order of the first pass follows from the seed and is not in it.
        """
        is_first = self._pass == 0
        return {
            "epoch": self._epoch,
            "pass": self._pass,
            "num_replicas": self._num_replicas,
            "num_samples": self._num_samples,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "seed": self._seed,
            "indices": None if is_first else list(self._indices),
            "is_copy": None if is_first else list(self._is_copy),
            "used": self._used,
            "dropped": list(self._dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with as many ranks.

        Raises:
            ConfigError: it is of another number of ranks or other samples.
        """
        if state["num_replicas"] != self._num_replicas:
            raise ConfigError(
                f"the sampler's state has num_replicas={state['num_replicas']}, here "
                f"it is {self._num_replicas}; start at an epoch's beginning, or give "
                "load_states those of all ranks"
            )
        self._set_from(state)
        self._indices, self._is_copy = self._part_of(state, self._rank)
        self._used = self._start = state["used"]
        self._dropped = list(state["dropped"])

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on where all ranks' states were taken, with any number of ranks.

        With another number the rest of the epoch is shared out anew: each sample that
        no rank was through with comes once, and what was dropped stays dropped.

        Args:
            states: every rank's ``state_dict``, in rank order.

        Raises:
            ConfigError: they are of other samples.
        """
        if len(states) == self._num_replicas:
            self.load_state_dict(states[self._rank])
            return
        self._set_from(states[0])
        left_by_rank = []
        for rank, state in enumerate(states):
            indices, is_copy = self._part_of(state, rank)
            places = range(state["used"], len(indices))
            left_by_rank.append([indices[p] for p in places if not is_copy[p]])
        # In the order in which the ranks would have come to them.
        turns = itertools.zip_longest(*left_by_rank)
        self._share_out([one for turn in turns for one in turn if one is not None])
        dropped = [index for state in states for index in state["dropped"]]
        self._dropped = dropped[self._rank :: self._num_replicas]

    def _set_from(self, state: Mapping[str, Any]) -> None:
        if state["num_samples"] != self._num_samples:
            raise ConfigError(
                f"the sampler's state has num_samples={state['num_samples']}, here it "
                f"is {self._num_samples}; load the same dataset"
            )
        self._epoch, self._pass = state["epoch"], state["pass"]
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._drop_last = state["drop_last"]
        self._issued = deque()

    def _part_of(
        self, state: Mapping[str, Any], rank: int
    ) -> tuple[list[int], list[bool]]:
        """What a rank was given in the pass of its state, and what is copies."""
        if state["indices"] is None:
            return self._first_pass(rank, state["num_replicas"])
        return list(state["indices"]), list(state["is_copy"])


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

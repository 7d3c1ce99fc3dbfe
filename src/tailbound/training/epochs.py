"""The sampler that a job was shown: what it is told after each step, and a restart."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from tailbound.errors import ConfigError
from tailbound.training.batches import num_samples
from tailbound.training.exchange import AllGather
from tailbound.training.samplers import ResamplingSampler, resampled_batches


class Epochs:
    """A job's dealings with its sampler; without one it does nothing."""

    def __init__(self) -> None:
        self._sampler: ResamplingSampler | None = None
        self._part_sizes: list[int] = []
        self._resumed: Sequence[dict[str, Any]] = ()

    def begin(
        self, loader: DataLoader[Any], all_gather: AllGather, *, resamples: bool
    ) -> Iterator[Any]:
        """Give a loader's batches; see ``Job.epoch``.

        Args:
            loader: its sampler is a ResamplingSampler.
            all_gather: exchanges bytes with all ranks.
            resamples: dropped samples come back before the epoch ends.

        Raises:
            ConfigError: it has another sampler.
        """
        sampler = loader.sampler
        if not isinstance(sampler, ResamplingSampler):
            raise ConfigError(
                "job.epoch needs DataLoader(sampler=tailbound.ResamplingSampler(...)), "
                "which learns what was dropped"
            )
        self._sampler = sampler
        resumed, self._resumed = self._resumed, ()
        if resumed and resumed[0]["epoch"] == sampler.epoch:
            sampler.load_states(resumed)
        if resamples:
            return resampled_batches(loader, sampler, all_gather)
        return iter(loader)

    def note_parts(self, parts: Iterable[Any]) -> None:
        """These micro-batches will be in the step."""
        if self._sampler is not None:
            self._part_sizes += [num_samples(part) for part in parts]

    def end_step(self, computed: int) -> None:
        """Say which samples of the step's batch were used: those at its front."""
        sizes, self._part_sizes = self._part_sizes, []
        if self._sampler is not None and sizes:
            self._sampler.acknowledge(sum(sizes), sum(sizes[:computed]))

    def state_dict(self) -> dict[str, Any] | None:
        """The sampler's; None if there is none."""
        return None if self._sampler is None else self._sampler.state_dict()

    def resume(self, states: Sequence[dict[str, Any]]) -> None:
        """All ranks' states, for when the epoch that they are of begins."""
        self._resumed = states

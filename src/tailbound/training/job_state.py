"""What a job carries over a restart: plain data, the same on all ranks.

Every rank's part is in it, so that one file of one rank is enough, and a job with
another number of ranks finds what there is to share out anew.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from tailbound.compute.budget import Budget
from tailbound.errors import ConfigError, HandshakeError
from tailbound.protocol.events import peer_name
from tailbound.training.epochs import Epochs
from tailbound.training.exchange import Exchange

VERSION = 1


class RankState(msgspec.Struct, frozen=True):
    """What one rank knows."""

    compute: dict[str, Any] | None
    """Of the compute bound, if there is one."""
    sampler: dict[str, Any] | None
    """Of the sampler that the job was shown."""


class JobState(msgspec.Struct, frozen=True):
    """The whole, as ``Job.state_dict`` gives it in dicts and lists."""

    version: int
    step: int
    """Steps done."""
    regime: dict[str, Any] | None
    """What the next loss bounds follow from; None: the server knows it."""
    ranks: list[RankState]

    @property
    def samplers(self) -> list[dict[str, Any]]:
        """The samplers' states, in rank order; empty if a rank has none."""
        found = [rank.sampler for rank in self.ranks if rank.sampler is not None]
        return found if len(found) == len(self.ranks) else []


def take_state(
    exchange: Exchange, budget: Budget | None, epochs: Epochs, step: int
) -> dict[str, Any]:
    """Gather the job's state; see ``Job.state_dict``."""
    own = RankState(
        None if budget is None else budget.state_dict(), epochs.state_dict()
    )
    regime = exchange.regime_state()
    parts = exchange.all_gather(msgspec.json.encode(own))
    ranks = [msgspec.json.decode(part, type=RankState) for part in parts]
    state: dict[str, Any] = msgspec.to_builtins(JobState(VERSION, step, regime, ranks))
    return state


def resume_from(
    state: Any, exchange: Exchange, budget: Budget | None, epochs: Epochs
) -> int:
    """Take a state over; returns the steps done. See ``Job.load_state_dict``."""
    told = read_state(state)
    if told.regime is not None:
        exchange.load_regime_state(told.regime)
    is_own = len(told.ranks) == exchange.world_size
    compute = told.ranks[exchange.rank if is_own else 0].compute
    if budget is not None and compute is not None:
        budget.load_state_dict(compute, is_own=is_own)
    epochs.resume(told.samplers)
    # Also keeps a rank that is done from a step that another still loads for.
    compare_states(exchange.all_gather(describe_state(told)))
    return told.step


def read_state(state: Any) -> JobState:
    """Check what a checkpoint brought.

    Raises:
        ConfigError: it is no state of a job, or one of a newer version.
    """
    try:
        told = msgspec.convert(state, JobState)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not what job.state_dict() gave: {error}") from error
    if told.version != VERSION or not told.ranks:
        raise ConfigError(
            f"a job's state of version {told.version}, this is tailbound's {VERSION}: "
            "resume with the version that wrote it, or without the state"
        )
    return told


def describe_state(state: JobState) -> bytes:
    """A line that tells two states apart, for the all-gather."""
    encoded = msgspec.json.encode(state, order="deterministic")
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    return f"step {state.step}, digest {digest}".encode()


def compare_states(lines: Sequence[bytes]) -> None:
    """See to it that all ranks loaded the same.

    Args:
        lines: every rank's ``describe_state``, in rank order.

    Raises:
        HandshakeError: they did not; names two ranks and what they loaded.
    """
    for rank, line in enumerate(lines):
        if line != lines[0]:
            raise HandshakeError(
                "the state loaded",
                f"{lines[0].decode()} ({peer_name(0)})",
                f"{line.decode()} ({peer_name(rank)})",
                "load the same checkpoint on every rank",
            )

"""The benchmark's result: what each turn cost, and what follows from all of them.

``BenchSummary`` is ``summary.json``, and what ``bench allreduce --json`` prints.
Durations are milliseconds, traffic megabytes (1e6 bytes), shares are in [0, 1].
Percentiles are interpolated between the two nearest rounds.
"""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from tailbound.report.text import six_digits


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What was run."""

    world: int
    """Ranks."""
    mbytes: float
    """Of a rank's gradient, float32, in megabytes."""
    rounds: int
    """That count."""
    warmup: int
    """Before those, not counted."""
    against: str
    """``gloo``, or ``none``."""
    plan: str
    """tailbound's: ``sharded`` or ``server``."""
    p_low: float
    """tailbound's loss bound in the critical regime, a share."""
    p_high: float
    """Outside it, a share."""
    hosts: bool
    """True: each rank on a host of its own, real packets of ``mtu`` bytes. False: all
    on the loopback interface."""
    mtu: int
    """Largest IP packet of the interface between the ranks, in bytes."""
    loss: float
    """Share of all TCP and UDP packets that the switch dropped."""
    burst: float
    """The same at the start of a burst round; 0: there was none."""
    burst_ms: float
    """How long a burst lasts, in milliseconds from the round's start."""
    burst_every: int
    """A burst strikes every so many rounds."""
    seed: int
    """Of the gradient's values."""
    cores: int
    """That all ranks shared."""
    load: float
    """Processes that wanted a core in the minute before, on average."""
    versions: dict[str, str]
    """Of what the result depends on."""
    started: str
    """UTC, ISO 8601."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce by one of the two libraries."""

    latency_ms: float
    """Of the slowest rank, in milliseconds."""
    user_ms: float
    """CPU time in the program, in milliseconds, mean over ranks."""
    system_ms: float
    """CPU time in the kernel, in milliseconds, mean over ranks."""
    wire_mb: float
    """Sent by all ranks' interfaces, headers included, in megabytes."""
    p: float
    """Loss bound, a share; 0 with Gloo."""
    missing_share: float
    """Chunks that were given up, over all chunks of all ranks; 0 with Gloo."""


class BenchRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round: both libraries reduce, one after the other, in changing order."""

    number: int
    """From 1; warm-up rounds are left out."""
    is_burst: bool
    """True if the loss rose at the start of each turn."""
    tailbound: Turn
    gloo: Turn | None
    """None: it was not asked for."""


class SideSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One library over all rounds."""

    p50_ms: float
    """Half of the rounds took at most so many milliseconds."""
    p95_ms: float
    """95 % of the rounds did, in milliseconds."""
    p99_ms: float
    """99 % of the rounds did, in milliseconds."""
    max_ms: float
    """The slowest round, in milliseconds."""
    mean_ms: float
    """Of all rounds, in milliseconds."""
    burst_ms: float | None
    """Median of the burst rounds, in milliseconds; None: there was none."""
    cpu_ms: float
    """CPU time of a rank in a round, program and kernel, in milliseconds, mean."""
    user_ms: float
    """The part in the program, in milliseconds."""
    system_ms: float
    """The part in the kernel, in milliseconds."""
    wire_mb: float
    """Sent by all ranks in a round, headers included, in megabytes, mean."""


class BoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """tailbound's rounds under one loss bound."""

    p: float
    """The bound, a share."""
    rounds: int
    """How many ran under it."""
    p50_ms: float
    """Their median, in milliseconds."""
    p95_ms: float
    """Their 95th percentile, in milliseconds."""
    missing_share: float
    """Chunks that were given up, over all chunks, mean."""


class BenchRatio(msgspec.Struct, frozen=True, kw_only=True):
    """tailbound over Gloo, without unit: below 1 tailbound is faster or cheaper."""

    p50: float
    p95: float
    p99: float
    max: float
    cpu: float
    """Of ``cpu_ms``."""
    wire: float
    """Of ``wire_mb``."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared in every turn, warm-up included. A difference ends the run."""

    exact: int
    """Turns in which nothing was missing: every rank had the known sum (Gloo) or mean
    (tailbound), bit for bit."""
    identical: int
    """Turns in which something was missing: every rank had the same bytes."""


class BenchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result."""

    settings: BenchSettings
    tailbound: SideSummary
    gloo: SideSummary | None
    """None: it was not asked for."""
    ratio: BenchRatio | None
    """None: there is nothing to compare with."""
    bounds: list[BoundSummary]
    """tailbound's rounds, apart by bound, the lowest first."""
    checked: Checked
    rounds: list[BenchRound]
    """In order."""

    def to_json(self) -> str:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self)).decode() + "\n"


def summarise_bench(
    settings: BenchSettings, rounds: list[BenchRound], checked: Checked
) -> BenchSummary:
    """Put a run's rounds together.

    Args:
        settings: of the run.
        rounds: one or more.
        checked: how many turns were compared.
    """
    tailbound = _side(rounds, lambda one: one.tailbound)
    gloo = None
    if all(one.gloo is not None for one in rounds):
        gloo = _side(rounds, lambda one: one.gloo)
    return BenchSummary(
        settings=settings,
        tailbound=tailbound,
        gloo=gloo,
        ratio=_ratio(tailbound, gloo) if gloo else None,
        bounds=list(_bounds([one.tailbound for one in rounds])),
        checked=checked,
        rounds=rounds,
    )


def _side(
    rounds: list[BenchRound], pick: Callable[[BenchRound], Turn | None]
) -> SideSummary:
    turns = [turn for one in rounds if (turn := pick(one)) is not None]
    bursts = [pick(one) for one in rounds if one.is_burst]
    latency_ms = [turn.latency_ms for turn in turns]
    user_ms = _mean(turn.user_ms for turn in turns)
    system_ms = _mean(turn.system_ms for turn in turns)
    return SideSummary(
        p50_ms=_percentile(latency_ms, 50.0),
        p95_ms=_percentile(latency_ms, 95.0),
        p99_ms=_percentile(latency_ms, 99.0),
        max_ms=max(latency_ms),
        mean_ms=_mean(latency_ms),
        burst_ms=_percentile([turn.latency_ms for turn in bursts if turn], 50.0)
        if bursts
        else None,
        cpu_ms=six_digits(user_ms + system_ms),
        user_ms=user_ms,
        system_ms=system_ms,
        wire_mb=_mean(turn.wire_mb for turn in turns),
    )


def _ratio(ours: SideSummary, theirs: SideSummary) -> BenchRatio:
    def over(name: str) -> float:
        return six_digits(getattr(ours, name) / getattr(theirs, name))

    return BenchRatio(
        p50=over("p50_ms"),
        p95=over("p95_ms"),
        p99=over("p99_ms"),
        max=over("max_ms"),
        cpu=over("cpu_ms"),
        wire=over("wire_mb"),
    )


def _bounds(turns: list[Turn]) -> Iterable[BoundSummary]:
    for p in sorted({turn.p for turn in turns}):
        under = [turn for turn in turns if turn.p == p]
        latency_ms = [turn.latency_ms for turn in under]
        yield BoundSummary(
            p=p,
            rounds=len(under),
            p50_ms=_percentile(latency_ms, 50.0),
            p95_ms=_percentile(latency_ms, 95.0),
            missing_share=_mean(turn.missing_share for turn in under),
        )


def _percentile(values: list[float], q: float) -> float:
    return six_digits(float(np.percentile(values, q)))


def _mean(values: Iterable[float]) -> float:
    return six_digits(float(np.mean(list(values))))

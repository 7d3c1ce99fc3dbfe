"""What a summary holds: settings, both runs in numbers, ratios, and the verdict.

Every share is in [0, 1], every ratio is fixed over adaptive (above 1: adaptive is
better), every latency is the way in, from the first datagram to the stop (spec N11).
None stands where nothing is known, because a run ended early or is not there.
"""

import msgspec

LOWER_IS_BETTER = frozenset({"perplexity"})


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """How slow workers were imitated (DropCompute, appendix:runtime_performace)."""

    micro_batches: int
    """Of a step (M)."""
    micro_batch_s: float
    """What each takes without delay (mu), in s; the delay is mu times eps."""
    max_drop: float
    """Share that the threshold may drop, in [0, 1]."""
    preempt: str
    """Where a step is cut: ``micro_batch`` or ``backward``."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was made; written as ``settings.json`` before its first step."""

    task: str
    """Name of the task, such as ``digits``."""
    workers: int
    """Ranks that train; the server is not one of them."""
    epochs: int
    """Epochs planned for each run."""
    batch_size: int
    """Samples of one worker in one step."""
    seed: int
    rtt_ms: float
    """Round-trip time added between worker and server, in ms."""
    loss: float
    """Background loss, a share in [0, 1)."""
    burst: float
    """Loss within a burst round, a share in [0, 1)."""
    burst_rounds: list[int]
    """Rounds with a burst: counters from 1, equal to the step's number."""
    p_low: float
    """Loss bound of the fixed run, and of the adaptive one while critical."""
    p_high: float
    """Loss bound of the adaptive run outside the critical regime."""
    mtu: int | str
    """Bytes of an IP packet, or ``auto``."""
    detector: str = ""
    """How the critical regime is found, in words; empty where nobody said."""
    versions: dict[str, str]
    """Version of each program that took part, by name."""
    started: str
    """When the run started, ISO 8601."""
    stragglers: Stragglers | None = None
    """The runs are neither, compute, network and both, with slow workers; None: they
    are fixed and adaptive, without."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers."""

    burst_ms: list[float | None]
    """For each burst round, latency of its slowest worker, in ms."""
    p99_ms: float | None
    """99th percentile over steps and workers, linear interpolation, in ms."""
    mean_ms: float | None
    p50_ms: float | None
    train_s: float | None
    """Training time at the last epoch's end, evaluation left out, in s; the slowest
    rank's."""
    metric: float | None
    """Held-out metric of the last epoch, mean over ranks."""
    metric_name: str | None
    retransmitted_share: float | None
    """Retransmitted datagrams over datagrams sent."""
    lost_share: float | None
    """Chunks missing when their round closed, over all chunks."""
    beyond_share: float | None = None
    """Those that the loss bound did not allow: a deadline gave them up."""
    cut_rounds: int = 0
    """Rounds that a deadline closed above their bound."""
    non_finite_steps: int = 0
    """Steps whose reduced gradient had inf or NaN."""
    probes_per_round: float | None
    critical_share: float | None
    """Rounds under the critical bound, over all rounds."""
    steps: int
    """The last step seen."""
    epochs: int
    """The last epoch finished."""
    identical: bool | None
    """All ranks had the same digest at the end of every epoch. None: no epoch has a
    digest of every rank, and none that are there differ."""

    @property
    def lower_is_better(self) -> bool:
        """True for a metric such as perplexity."""
        return self.metric_name in LOWER_IS_BETTER


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed over adaptive."""

    burst: list[float | None]
    """For each burst round."""
    p99: float | None
    mean: float | None
    train: float | None
    metric_kept: float | None
    """How good adaptive's metric is against fixed's; 1 is equal, above 1 is better:
    adaptive over fixed, or fixed over adaptive where lower is better."""


class BurstSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a burst round's slowest worker went."""

    round: int
    rank: int
    round_trips: int
    """Probes that were sent and answered."""
    latency_ms: float
    round_trips_ms: float
    """Part of latency_ms between a probe and its answer."""
    bytes_ms: float
    """The rest: sending and resending data."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Both runs, compared."""

    fixed: RunSummary | None
    """The run with one loss bound (MLT). None: it left no records."""
    adaptive: RunSummary | None
    """The run with the phase-aware loss bound (DBLP). None: it left no records."""
    ratio: Ratio
    burst_split: dict[str, list[BurstSplit | None]]
    """By run, one entry for each burst round."""
    verdict: str
    """The outcome in plain words."""
    settings: RunSettings

    def to_json(self) -> str:
        """Encode as one JSON object; what is not finite becomes null."""
        text = msgspec.json.encode(self)
        return msgspec.json.format(text, indent=2).decode()

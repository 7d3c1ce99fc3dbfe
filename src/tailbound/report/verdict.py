"""Say in plain words what came out of a run: a headline, a paragraph, and warnings.

Every function here takes a :class:`~tailbound.report.outcome.Summary` and reads its
numbers only; a sentence whose numbers are not known is left out.
"""

from tailbound.report.outcome import BurstSplit, RunSummary, Summary
from tailbound.report.series import mean
from tailbound.report.text import (
    decimals_for,
    listing,
    metric,
    number,
    percent,
    plural,
    with_unit,
)

NAMES = {"fixed": "fixed", "adaptive": "phase-aware"}
SAME_RATIO = 0.05
"""Latency ratios closer to 1 than this are called the same: runs differ so much."""
SAME_SHARE = 0.01
"""The same for training time."""
SAME_PACE = "about as fast"


def make_verdict(summary: Summary) -> str:
    """The outcome in a few sentences, warnings last."""
    return " ".join([*lead(summary), *details(summary), *warnings(summary)])


def lead(summary: Summary) -> list[str]:
    """What a burst round took, and how much of it was round trips and bytes."""
    if summary.fixed is None and summary.adaptive is None:
        return ["There are no records of a run named fixed or adaptive."]
    return list(filter(None, [burst_sentence(summary), split_sentence(summary)]))


def details(summary: Summary) -> list[str]:
    """All rounds, training time, what it cost, and whether replicas stayed equal."""
    fixed, adaptive = summary.fixed, summary.adaptive
    sentences = []
    if fixed is not None and adaptive is not None:
        sentences = [
            latency_sentence(fixed, adaptive),
            train_sentence(fixed, adaptive),
            metric_sentence(fixed, adaptive, summary.ratio.metric_kept),
        ]
    return list(filter(None, [*sentences, identical_sentence(summary)]))


def headline(summary: Summary) -> str:
    """The one thing to remember, without a full stop."""
    pairs = burst_pairs(summary)
    if pairs:
        ratio = mean_latency([f for f, _ in pairs]) / mean_latency(
            [a for _, a in pairs]
        )
        return f"Burst rounds were {faster_headline(ratio)}"
    if summary.ratio.mean:
        return f"Rounds were {faster_headline(summary.ratio.mean)}"
    present = [name for name, run in both(summary) if run is not None]
    if len(present) == 1:
        return f"Only the {NAMES[present[0]]} run left records"
    return "The runs left too little to compare"


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before trusting the numbers; empty if all is well."""
    lines: list[str] = []
    if summary.fixed is None and summary.adaptive is None:
        return lines
    for key, run in both(summary):
        name = NAMES[key]
        if run is None:
            lines.append(f"The {name} run left no records.")
            continue
        if run.epochs < summary.settings.epochs:
            lines.append(
                f"The {name} run ended early, at step {run.steps}, with {run.epochs} "
                f"of {plural(summary.settings.epochs, 'epoch')} done."
            )
        if run.cut_rounds:
            lines.append(
                f"A deadline cut {plural(run.cut_rounds, 'gradient')} of the {name} "
                f"run: {percent(run.beyond_share)} of all chunks were given up beyond "
                "the loss bound."
            )
        if run.non_finite_steps:
            lines.append(
                f"In {plural(run.non_finite_steps, 'step')} of the {name} run the "
                "gradient had inf or NaN."
            )
        if run.identical is False:
            lines.append(
                f"The parameters of the {name} run differed between ranks: "
                "its metric is not that of one model."
            )
    return lines


def burst_sentence(summary: Summary) -> str:
    """How long a burst round took, in both runs or in the one that has any."""
    pairs = burst_pairs(summary)
    if pairs:
        fixed_ms = mean_latency([fixed for fixed, _ in pairs])
        adaptive_ms = mean_latency([adaptive for _, adaptive in pairs])
        on_average = " on average" if len(pairs) > 1 else ""
        return (
            f"A burst round took {number(fixed_ms)} ms{on_average} with the fixed "
            f"bound and {number(adaptive_ms)} ms with the phase-aware one "
            f"({faster(fixed_ms / adaptive_ms)})."
        )
    for key, _ in both(summary):
        known = known_splits(summary, key)
        if known:
            took = number(mean_latency(known))
            return f"A burst round took {took} ms in the {NAMES[key]} run."
    return ""


def split_sentence(summary: Summary) -> str:
    """How much of a burst round was round trips, and how much was bytes."""
    parts = []
    for key, _ in both(summary):
        splits = known_splits(summary, key)
        pairs = burst_pairs(summary)
        if pairs:
            splits = [pair[0 if key == "fixed" else 1] for pair in pairs]
        if splits:
            parts.append(split_clause(NAMES[key], splits))
    return f"Of {'; of '.join(parts)}." if parts else ""


def split_clause(name: str, splits: list[BurstSplit]) -> str:
    """The clause about one run; its three times add up as printed."""
    total_ms = mean_latency(splits)
    digits = decimals_for(total_ms)
    total_ms = round(total_ms, digits)
    waiting_ms = round(mean([split.round_trips_ms for split in splits]), digits)
    part = f"{waiting_ms / total_ms:.0%}".replace("%", " %") if total_ms else "0 %"
    trips = plural(mean([float(split.round_trips) for split in splits]), "round trip")
    were = "was" if trips == "1 round trip" else "were"
    return (
        f"the {name} run's {total_ms:.{digits}f} ms, {waiting_ms:.{digits}f} ms "
        f"({part}) {were} {trips} and {total_ms - waiting_ms:.{digits}f} ms were bytes"
    )


def latency_sentence(fixed: RunSummary, adaptive: RunSummary) -> str:
    """Mean and 99th percentile over all rounds."""
    if fixed.mean_ms is None or adaptive.mean_ms is None:
        return ""
    return (
        f"Over all rounds, the mean latency was {number(fixed.mean_ms)} ms against "
        f"{number(adaptive.mean_ms)} ms, and the 99th percentile "
        f"{number(fixed.p99_ms)} ms against {number(adaptive.p99_ms)} ms."
    )


def train_sentence(fixed: RunSummary, adaptive: RunSummary) -> str:
    """Training time of both, and the change."""
    if not fixed.train_s or adaptive.train_s is None:
        return ""
    change = adaptive.train_s / fixed.train_s - 1.0
    less = f"{percent(abs(change))} {'less' if change < 0 else 'more'}"
    if abs(change) < SAME_SHARE:
        less = "about as long"
    return (
        f"Training took {with_unit(fixed.train_s, 's')} with the fixed bound and "
        f"{with_unit(adaptive.train_s, 's')} with the phase-aware one "
        f"({less})."
    )


def metric_sentence(fixed: RunSummary, adaptive: RunSummary, kept: float | None) -> str:
    """What the metric was, and how much of it the phase-aware bound kept."""
    if not kept:
        return ""
    lower = "; lower is better" if fixed.lower_is_better else ""
    change = "as good as" if kept == 1.0 else f"{percent(kept)} of"
    if kept != 1.0 and fixed.lower_is_better:
        sign = "better" if kept > 1.0 else "worse"
        change = f"{percent(abs(1.0 / kept - 1.0))} {sign} than"
    return (
        f"The {fixed.metric_name} ended at {metric(fixed.metric)} with the fixed bound "
        f"and at {metric(adaptive.metric)} with the phase-aware one "
        f"({change} the fixed run's{lower})."
    )


def identical_sentence(summary: Summary) -> str:
    """Which runs kept their replicas bit-identical."""
    names = [NAMES[key] for key, run in both(summary) if run and run.identical]
    if not names:
        return ""
    runs = "both runs" if len(names) == 2 else f"the {listing(names)} run"
    return f"In {runs} the parameters were bit-identical on all ranks at every epoch."


def both(summary: Summary) -> list[tuple[str, RunSummary | None]]:
    """The two runs with their keys, fixed first."""
    return [("fixed", summary.fixed), ("adaptive", summary.adaptive)]


def known_splits(summary: Summary, key: str) -> list[BurstSplit]:
    """A run's burst rounds, without those that it did not reach."""
    return [split for split in summary.burst_split[key] if split is not None]


def burst_pairs(summary: Summary) -> list[tuple[BurstSplit, BurstSplit]]:
    """The burst rounds that both runs reached and that took time in both."""
    fixed, adaptive = summary.burst_split["fixed"], summary.burst_split["adaptive"]
    return [
        (one, other)
        for one, other in zip(fixed, adaptive, strict=True)
        if one is not None and other is not None
        if one.latency_ms > 0.0 and other.latency_ms > 0.0
    ]


def mean_latency(splits: list[BurstSplit]) -> float:
    """Mean latency of one or more burst rounds, in ms."""
    return mean([split.latency_ms for split in splits])


def faster(ratio: float) -> str:
    """A positive ratio of fixed over adaptive in words."""
    if abs(ratio - 1.0) < SAME_RATIO:
        return SAME_PACE
    if ratio > 1.0:
        return f"{ratio:.1f} times faster"
    return f"{1.0 / ratio:.1f} times slower"


def faster_headline(ratio: float) -> str:
    """The same, with what was compared."""
    pace = faster(ratio)
    bound = "either loss bound" if pace == SAME_PACE else "the phase-aware loss bound"
    return f"{pace} with {bound}"

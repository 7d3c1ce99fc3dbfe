"""The four runs in words: what each bound gained, dropped, and did to the metric."""

from tailbound.report.tails import NAMES, RUNS, TailSummary
from tailbound.report.text import percent, times, with_unit


def headline(summary: TailSummary) -> str:
    """The outcome in a line."""
    both = summary.ratio["both"].step
    if both is None:
        return "Not all of the four runs left records"
    alone = [summary.ratio[name].step or 1.0 for name in ("compute", "network")]
    said = f"With both bounds a step is {times(both)} as fast"
    if both > max(*alone, 1.0):
        return f"{said}, with one alone at most {times(max(alone))}"
    return f"{said}; the better one alone gives {times(max(alone))}"


def sentences(summary: TailSummary) -> list[str]:
    """The verdict, a sentence for each thing that a reader should know."""
    said = [gain for name in RUNS[1:] if (gain := _gain(summary, name))]
    runs = [run for name in RUNS if (run := summary.run(name)) is not None]
    looks = None if summary.compute is None else summary.compute.looks
    if looks is not None and looks.predicted_step_ms is not None:
        assert summary.compute is not None
        said.append(
            "The compute bound predicted, from the calibration, "
            f"{with_unit(looks.predicted_step_ms, 'ms')} a step at "
            f"{percent(looks.predicted_drop)} dropped; realised were "
            f"{with_unit(summary.compute.step_ms, 'ms')} at "
            f"{percent(summary.compute.dropped_share)}. They differ where later steps "
            "are not like those of the calibration, by the overshoot "
            f"({with_unit(summary.compute.overshoot_ms, 'ms')} on average), and as the "
            "part of an unfinished micro-batch that is kept counts as computed."
        )
    looks_of_all = [run.looks for run in runs if run.looks is not None]
    slow = {rank for told in looks_of_all for rank in told.persistent_stragglers}
    if slow:
        ranks = ", ".join(map(str, sorted(slow)))
        said.append(f"Slow all the time: rank {ranks}; rebalance or replace it.")
    if any(run.identical is False for run in runs):
        said.append("REPLICAS DIFFER: parameters were not the same on all ranks.")
    return said


def _gain(summary: TailSummary, name: str) -> str:
    """What one run gained over the one with neither bound."""
    base, run, ratio = summary.neither, summary.run(name), summary.ratio[name]
    if base is None or run is None or ratio.step is None:
        return ""
    text = (
        f"{NAMES[name].capitalize()}: a step takes {with_unit(run.step_ms, 'ms')} "
        f"instead of {with_unit(base.step_ms, 'ms')}, with a standard deviation of "
        f"{with_unit(run.step_std_ms, 'ms')} instead of "
        f"{with_unit(base.step_std_ms, 'ms')}"
    )
    if run.looks is not None:
        text += f"; {percent(run.dropped_share)} of the micro-batches are dropped"
    if ratio.same_loss is not None:
        text += f"; the same loss is reached {times(ratio.same_loss)} as fast"
    if ratio.metric_kept is not None:
        text += f"; {percent(ratio.metric_kept)} of the metric is kept"
    return f"{text}."

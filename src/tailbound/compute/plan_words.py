"""A plan in plain words: what to gain, from what, and what to do next."""

from collections.abc import Iterator

from tailbound.compute.plans import Outcome, Plan

WORTH_IT = 1.01
"""Speedups below this are not worth a change."""
SAFE_DROP = 0.10
"""The papers saw no loss of accuracy up to this share."""
MOSTLY = 0.5
"""A worker that is the slowest in so many steps is told, if it has OFTENER times its
turn."""
OFTENER = 1.5
MOST_NAMES = 8
"""More workers than these are counted."""
FEW_STEPS = 20
"""With fewer steps a tail is hardly seen."""


def headline(plan: Plan) -> str:
    """The outcome in one sentence."""
    one = best(plan)
    if plan.persistent_stragglers:
        names, verb = _workers(plan.persistent_stragglers)
        text = f"W{names[1:]} {verb} slow all the time: rebalance or replace first"
        if is_worth(one):
            text += f"; within {percent(plan.max_drop)} drop a bound gains {gain(one)}"
        return text
    if not is_worth(one):
        return "No threshold would make this job noticeably faster"
    assert one.threshold_s is not None
    return (
        f"DropCompute would get {gain(one)} more done per second, with a threshold of "
        f"{seconds(one.threshold_s)} and {percent(one.dropped_share)} dropped"
    )


def sentences(plan: Plan) -> Iterator[str]:
    """What is behind the headline."""
    yield _time(plan)
    one = best(plan)
    if is_worth(one):
        yield (
            f"Bounded, a step takes {seconds(one.step_s)} on average instead of "
            f"{seconds(one.baseline_step_s)}, and {percent(one.dropped_share)} of "
            f"the micro-batches are dropped: {times(one.speedup)} in all."
        )
        yield _preempt(plan)
    yield _straggler(plan)
    yield from _cap(plan)
    yield from _scale(plan)
    yield from _doubts(plan)


def advice(plan: Plan) -> str:
    """What to do next; a line to paste, or what to look at first."""
    if plan.persistent_stragglers:
        names, _ = _workers(plan.persistent_stragglers)
        return (
            f"Look at {names} first (hardware, clocks, data, other jobs), then "
            "record and plan again."
        )
    if not is_worth(best(plan)):
        return "Leave the bound off: there is no tail to cut in this trace."
    return f"Write: {plan.next_line}"


def best(plan: Plan) -> Outcome:
    """The plan's own outcome, unless only finishing micro-batches is worth it."""
    return plan if is_worth(plan) or not is_worth(plan.finishing) else plan.finishing


def is_worth(outcome: Outcome) -> bool:
    """True if the gain is worth a change."""
    return outcome.threshold_s is not None and outcome.speedup >= WORTH_IT


def gain(outcome: Outcome) -> str:
    """The speedup as a percentage: ``19.5 %``."""
    return percent(outcome.speedup - 1.0)


def percent(share: float) -> str:
    """``10.9 %``; one decimal, none if it is 0."""
    return f"{100.0 * share:.1f}".removesuffix(".0") + " %"


def times(ratio: float) -> str:
    """Two decimals: ``1.19×``."""  # noqa: RUF002
    return f"{ratio:.2f}×"  # noqa: RUF001


def seconds(time_s: float) -> str:
    """Four digits, in s or ms: ``5.725 s``, ``84.2 ms``."""
    return f"{time_s:.4g} s" if time_s >= 1.0 else f"{1e3 * time_s:.4g} ms"


def _time(plan: Plan) -> str:
    return (
        f"In the trace ({plan.num_steps} steps, {plan.num_workers} workers, "
        f"{plan.num_micro_batches} micro-batches) the slowest worker of a step "
        f"computes {times(plan.iteration_ratio)} as long as the average one: "
        f"{percent(1.0 - 1.0 / plan.iteration_ratio)} of the compute time is waiting."
    )


def _preempt(plan: Plan) -> str:
    """What becomes of a micro-batch that runs at the threshold, and what else could."""
    finishing = plan.finishing
    if best(plan) is finishing:
        return (
            "Here a micro-batch that runs at the threshold is finished "
            '(preempt="micro_batch", the default); to leave it (preempt="backward") '
            "gains nothing."
        )
    text = (
        'Here a micro-batch that runs at the threshold is left (preempt="backward"). '
        'If it is finished (preempt="micro_batch", the default)'
    )
    if finishing.threshold_s is None:
        return f"{text}, no threshold gains anything."
    return (
        f"{text}: {times(finishing.speedup)}, with a threshold of "
        f"{seconds(finishing.threshold_s)} and {percent(finishing.dropped_share)} "
        "dropped."
    )


def _straggler(plan: Plan) -> str:
    if plan.straggler == "none":
        return "No worker is slower than the others."
    if plan.straggler == "moves":
        return _moving(plan)
    names, verb = _workers(plan.persistent_stragglers)
    lost = max(plan.dropped_share_W[name] for name in plan.persistent_stragglers)
    text = f"The straggler persists: {names} {verb} slow in step after step."
    if lost > 0.0:
        owner = "that worker's" if verb == "is" else "each one's"
        text += (
            f" A threshold drops up to {percent(lost)} of {owner} work; it hides the "
            "cause and does not mend it."
        )
    better = plan.without_stragglers
    if better is not None:
        on_top = gain(better) if is_worth(better) else "nothing"
        text += (
            f" Without, a step would take {seconds(better.baseline_step_s)} instead "
            f"of {seconds(plan.baseline_step_s)}, and a threshold gain {on_top} on top."
        )
    return text


def _moving(plan: Plan) -> str:
    worst, share = max(plan.slowest_share_W.items(), key=lambda item: item[1])
    if share < max(MOSTLY, OFTENER / plan.num_workers):
        return (
            f"The straggler moves: worker {worst} is the slowest most often, in "
            f"{percent(share)} of the steps."
        )
    text = (
        f"The straggler is mostly worker {worst}, in {percent(share)} of the steps, "
        "though not by enough to be called slow all the time"
    )
    lost = sum(plan.dropped_share_W.values())
    if lost > 0.0:
        text += f"; of what is dropped {percent(plan.dropped_share_W[worst] / lost)} "
        text += "is its work"
    return f"{text}."


def _workers(names: list[str]) -> tuple[str, str]:
    """Names as the subject of a sentence, and its verb."""
    if len(names) == 1:
        return f"worker {names[0]}", "is"
    if len(names) > MOST_NAMES:
        more = len(names) - MOST_NAMES
        return f"workers {', '.join(names[:MOST_NAMES])} and {more} more", "are"
    return f"workers {', '.join(names[:-1])} and {names[-1]}", "are"


def _cap(plan: Plan) -> Iterator[str]:
    free = plan.unlimited
    if free.threshold_s is not None and free.dropped_share > plan.max_drop:
        yield (
            f"The limit of {percent(plan.max_drop)} binds: without it the best "
            f"threshold is {seconds(free.threshold_s)}, drops "
            f"{percent(free.dropped_share)} and gives {times(free.speedup)}."
        )
    if is_worth(best(plan)) and best(plan).dropped_share > SAFE_DROP:
        yield (
            f"More than {percent(SAFE_DROP)} dropped is beyond what the papers found "
            "harmless for the result."
        )


def _scale(plan: Plan) -> Iterator[str]:
    """What other jobs would gain."""
    told = []
    for one in plan.estimates:
        size = []
        if one.num_workers != plan.num_workers:
            size.append(f"{one.num_workers} workers")
        if one.num_micro_batches != plan.num_micro_batches:
            size.append(f"{one.num_micro_batches} micro-batches")
        told.append(f"{times(one.speedup)} with {' and '.join(size)}")
    if told:
        yield (
            f"Estimated from the trace: {', '.join(told)} (what is added is drawn "
            "from the trace as if independent of the rest of its step)."
        )


def _doubts(plan: Plan) -> Iterator[str]:
    if not plan.is_comm_known:
        yield (
            "The communication time is not known and counts as 0: with it "
            "(--comm-time) the gain is smaller."
        )
    if plan.slow_first_steps:
        yield (
            f"The first steps ({plan.slow_first_steps}) took over twice the median: "
            f"if that is warm-up, leave them out with --skip {plan.slow_first_steps}."
        )
    if plan.num_steps < FEW_STEPS:
        yield (
            f"The trace has few steps ({plan.num_steps}); {FEW_STEPS} or more show "
            "the tail better."
        )
    if plan.left_out_steps:
        yield f"Steps left out because they are not whole: {plan.left_out_steps}."
    if plan.imputed_share:
        yield (
            f"A threshold cut {percent(plan.imputed_share)} of the micro-batches when "
            "the trace was recorded; they were filled in."
        )

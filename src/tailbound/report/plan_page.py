"""A plan as a folder: ``plan.json``, ``plan.html`` and a picture of each plot.

The page needs nothing from anywhere else, and follows the reader's light or dark theme.
Every name that comes from a file is escaped.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tailbound.compute.plan_words import (
    advice,
    best,
    headline,
    is_worth,
    percent,
    seconds,
    sentences,
    times,
)
from tailbound.compute.plans import Plan
from tailbound.compute.samples import Floats
from tailbound.report.build import write_whole
from tailbound.report.folders import filled_folder
from tailbound.report.page import document, figure, pairs_table, prose, table, tile
from tailbound.report.plan_rows import (
    SIZE_HEADINGS,
    WORKER_HEADINGS,
    size_rows,
    worker_rows,
)
from tailbound.report.plots import Plot
from tailbound.report.text import UNKNOWN, plural

FEW_WORKERS = 16
"""Tables of more are folded away."""
PLAN_STYLE = """
.tile .values{white-space:normal}
pre{margin:12px 0 0;padding:10px 14px;border:1px solid var(--rule);border-radius:8px;
  white-space:pre-wrap;overflow-wrap:anywhere;font-size:.875rem}
"""


def write_plan(folder: Path, plan: Plan, latency_s_SWM: Floats, name: str) -> Path:
    """Write a plan's folder.

    Args:
        folder: is made; files of an older plan are replaced.
        plan: of the trace.
        latency_s_SWM: of the trace.
        name: of the trace, for people.

    Returns:
        The path of the page.

    Raises:
        ConfigError, MissingExtraError: see
            :func:`~tailbound.report.folders.filled_folder`.
    """
    page = folder / "plan.html"
    with filled_folder(folder):
        from tailbound.report.plan_plots import render_plan_plots, write_plan_pngs

        write_whole(folder / "plan.json", plan.to_json())
        write_plan_pngs(folder, plan, latency_s_SWM)
        plots = render_plan_plots(plan, latency_s_SWM)
        write_whole(page, make_plan_page(plan, plots, name))
    return page


def make_plan_page(plan: Plan, plots: list[Plot], name: str) -> str:
    """Put the page together; the same input gives the same text."""
    return document(
        f"tailbound plan: {name}",
        [
            *opening(plan, name),
            *(line for plot in plots for line in figure(plot)),
            *sizes(plan),
            *workers(plan),
            *made_from(plan, name),
        ],
        extra_style=PLAN_STYLE,
    )


def opening(plan: Plan, name: str) -> Iterator[str]:
    """Headline, the four numbers, the verdict, and what to write."""
    yield "<header>"
    yield (
        f'<p class="eyebrow">tailbound plan · {escape(name)} · '
        f"{escape(plural(plan.num_workers, 'worker'))}</p>"
    )
    yield f"<h1>{prose(headline(plan))}</h1>"
    one = best(plan)
    tiles = (
        (
            "effective speedup",
            times(one.speedup),
            f"{seconds(one.baseline_step_s)} → {seconds(one.step_s)} a step",
        ),
        ("dropped", percent(one.dropped_share), f"limit {percent(plan.max_drop)}"),
        (
            "threshold",
            UNKNOWN if one.threshold_s is None else seconds(one.threshold_s),
            "none gains anything" if one.threshold_s is None else "of a step's compute",
        ),
        ("slowest / average", times(plan.iteration_ratio), "compute of a worker"),
    )
    yield '<div class="tiles">'
    for label, value, note in tiles:
        yield tile(label, value, note)
    yield "</div>"
    items = "".join(f"<li>{prose(sentence)}</li>" for sentence in sentences(plan))
    yield f'<ul class="verdict">{items}</ul>'
    if is_worth(one) and not plan.persistent_stragglers:
        yield f"<pre>{escape(plan.next_line)}</pre>"
    else:
        yield f'<p class="verdict">{prose(advice(plan))}</p>'
    yield "</header>"


def sizes(plan: Plan) -> Iterator[str]:
    """The table of the trace and the estimates."""
    yield "<section>"
    yield "<h2>Other sizes</h2>"
    yield from table(
        SIZE_HEADINGS, [(row.cells, row.is_main) for row in size_rows(plan)]
    )
    yield (
        '<p class="note">The first row is the trace, the others are estimates: what is '
        "recorded stays, what is added is drawn from it, independent of the rest of "
        "its step. Each is with its best threshold within "
        f"{prose(percent(plan.max_drop))} drop.</p>"
    )
    yield "</section>"


def workers(plan: Plan) -> Iterator[str]:
    """The table of the workers, folded away where they are many."""
    yield "<section>"
    yield "<h2>Worker by worker</h2>"
    rows = worker_rows(plan)
    is_open = " open" if len(rows) <= FEW_WORKERS else ""
    yield f"<details{is_open}>"
    yield f"<summary>{escape(plural(len(rows), 'worker'))}, slowest first</summary>"
    yield from table(WORKER_HEADINGS, [(row.cells, row.is_main) for row in rows])
    yield "</details>"
    yield "</section>"


def made_from(plan: Plan, name: str) -> Iterator[str]:
    """What the plan was made from."""
    rows = [
        ("trace", name),
        ("steps", str(plan.num_steps)),
        ("workers", str(plan.num_workers)),
        ("micro-batches", str(plan.num_micro_batches)),
        (
            "communication time",
            f"{seconds(plan.comm_s)} a step"
            if plan.is_comm_known
            else "not known, 0 s",
        ),
        ("limit of the drop", percent(plan.max_drop)),
    ]
    yield "<section>"
    yield "<h2>How it was made</h2>"
    yield from pairs_table("Trace and settings", rows)
    yield "</section>"

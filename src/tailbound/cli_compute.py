"""The commands of the compute tail: ``plan`` and ``simulate``; ``cli`` adds them.

As in ``cli``, heavy imports stand inside each.
"""

from pathlib import Path
from typing import Annotated

import typer

from tailbound.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to an app."""
    app.command()(plan)
    app.command()(simulate)


def plan(
    trace: Annotated[
        list[str],
        typer.Argument(
            help="Trace files (.csv, .csv.gz, .parquet), a job's records (.jsonl), "
            "folders of them, or quoted patterns; together they are one trace."
        ),
    ],
    comm_time: Annotated[
        float | None,
        typer.Option(help="Seconds of communication in a step; else the records'."),
    ] = None,
    max_drop: Annotated[
        float, typer.Option(help="Share of micro-batches to drop at most, 0 to 1.")
    ] = 0.10,
    workers: Annotated[
        str | None,
        typer.Option(help="Estimate for so many workers; or several, as 64,128."),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(help="Estimate for so many micro-batches; or several."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Which run, if the records hold several.")
    ] = None,
    skip: Annotated[
        int, typer.Option(help="Steps at the start to leave out: warm-up.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write plan.json, plan.html and pictures into this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a compute bound would gain on a recorded trace.

    A trace has the columns step, worker, micro_batch and seconds;
    tailbound.record_latencies makes one in any PyTorch loop.
    """
    import numpy as np

    from tailbound.compute.planner import plan as make_plan
    from tailbound.compute.traces import read_traces

    found = read_traces(trace, run=run).without_first(skip)
    made = make_plan(
        found,
        comm_s=comm_time,
        max_drop=max_drop,
        num_workers=parse_counts("--workers", workers),
        num_micro_batches=parse_counts("--micro-batches", micro_batches),
        rng=np.random.default_rng(0),
    )
    page = None
    if out is not None:
        from tailbound.report.plan_page import write_plan

        more = f" and {len(trace) - 1} more" if len(trace) > 1 else ""
        page = write_plan(out, made, found.latency_s_SWM, f"{trace[0]}{more}")
    if as_json:
        typer.echo(made.to_json())
        return
    from rich.console import Console

    from tailbound.compute.plan_words import advice
    from tailbound.report.plan_table import make_plan_table

    console = Console()
    console.print(make_plan_table(made))
    # Unbroken, since it may be a line to paste.
    console.print(advice(made), soft_wrap=True, markup=False, highlight=False)
    if page is not None:
        console.print(f"plan: {page}", soft_wrap=True)


def simulate(
    noise: Annotated[
        str,
        typer.Option(
            help="Added to each micro-batch: lognormal, normal, bernoulli, "
            "exponential, gamma or delay."
        ),
    ] = "delay",
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, as 1,16,200,2048.")
    ] = "1,16,200,2048",
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of a worker in a step.")
    ] = 12,
    base: Annotated[
        float, typer.Option(help="Seconds of a micro-batch without noise.")
    ] = 0.45,
    comm_time: Annotated[
        float, typer.Option(help="Seconds of communication in a step.")
    ] = 0.5,
    max_drop: Annotated[
        float, typer.Option(help="Share of micro-batches to drop at most, 0 to 1.")
    ] = 1.0,
    variance: Annotated[
        float | None,
        typer.Option(help="Of the noise, in square seconds; else the paper's."),
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(help="uniform or one_server: workers that wait 1 s now and then."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to simulate; default by workers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write simulation.json and the scale graph into this folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate steps of more and more workers, without and with a threshold."""
    from rich.console import Console

    from tailbound.compute.simulate import simulate as run_simulation

    with Console(stderr=True).status("simulating"):
        made = run_simulation(
            noise,
            parse_counts("--workers", workers),
            micro_batches,
            base,
            comm_time,
            seed,
            steps=steps,
            max_drop=max_drop,
            variance=variance,
            stragglers=stragglers,
        )
    picture = None
    if out is not None:
        from tailbound.report.folders import write_simulation

        picture = write_simulation(out, made)
    if as_json:
        typer.echo(made.to_json())
        return
    from tailbound.report.scale_table import make_scale_table

    console = Console()
    console.print(make_scale_table(made))
    if picture is not None:
        console.print(f"scale graph: {picture}", soft_wrap=True)


def parse_counts(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers with commas between them; none for None.

    Raises:
        ConfigError: the text is something else.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(
            f"{option} is a whole number or several, such as 16,64, not {text!r}"
        )
    return tuple(map(int, parts))

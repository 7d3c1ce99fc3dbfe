"""The command ``tailbound bench allreduce``; ``cli`` adds it.

As in ``cli``, heavy imports stand inside.
"""

from pathlib import Path
from typing import Annotated

import typer

from tailbound.cli_compute import Json


def add_commands(app: typer.Typer) -> None:
    """Add the group ``bench`` to an app."""
    bench = typer.Typer(
        help="Measure tailbound beside another library, in one run.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    bench.command()(allreduce)
    # A group of one command keeps its name only with a callback.
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")


def allreduce(
    world: Annotated[int, typer.Option(help="Ranks, a process each.")] = 4,
    mbytes: Annotated[
        float, typer.Option(help="Of each rank's gradient, in megabytes.")
    ] = 100.0,
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 20,
    warmup: Annotated[int, typer.Option(help="Rounds before those.")] = 3,
    against: Annotated[str, typer.Option(help="gloo or none.")] = "gloo",
    plan: Annotated[str, typer.Option(help="sharded or server.")] = "sharded",
    p: Annotated[
        float | None,
        typer.Option(help="A fixed loss bound, instead of --p-low and --p-high."),
    ] = None,
    p_low: Annotated[
        float | None, typer.Option(help="Bound in the critical regime; default 0.008.")
    ] = None,
    p_high: Annotated[
        float | None, typer.Option(help="Bound outside it; default 0.408.")
    ] = None,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Each rank on a host of its own (network namespaces; root only), with "
            "packets of 1500 bytes. Otherwise all on the loopback interface.",
        ),
    ] = False,
    loss: Annotated[
        float, typer.Option(help="Packets that the hosts' switch drops, 0 to 1.")
    ] = 0.0,
    burst: Annotated[
        float, typer.Option(help="The same at the start of every 10th round.")
    ] = 0.0,
    burst_ms: Annotated[
        float, typer.Option(help="How long a burst lasts, in milliseconds.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(help="Of the gradient's values.")] = 0,
    timeout_s: Annotated[
        float, typer.Option(help="Longest wait for a rank in a round.")
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write summary.json, bench.html and cdf.png there."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tailbound's all-reduce and Gloo's, in turns, over the same network.

    Every result is checked: exact where nothing is missing, and the same on all ranks.
    """
    from rich.console import Console

    from tailbound.lab.bench import BenchOptions, run_bench

    options = BenchOptions(
        world=world,
        mbytes=mbytes,
        rounds=rounds,
        warmup=warmup,
        against=against,
        plan=plan,
        p=p,
        p_low=p_low,
        p_high=p_high,
        hosts=hosts,
        loss=loss,
        burst=burst,
        burst_ms=burst_ms,
        seed=seed,
        timeout_s=timeout_s,
    )
    with Console(stderr=True).status("starting") as status:
        summary = run_bench(options, status.update)
    page = None
    if out is not None:
        from tailbound.report.bench_page import write_bench

        page = write_bench(out, summary)
    if as_json:
        typer.echo(summary.to_json(), nl=False)
        return
    from tailbound.report.bench_table import make_bench_table

    console = Console()
    console.print(make_bench_table(summary))
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True)

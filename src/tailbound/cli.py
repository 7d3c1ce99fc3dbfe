"""The commands. Heavy imports stand inside each, so that ``--help`` is quick.

A mistake of the user or trouble of the world is one line on standard error and exit
code 1 (2 for a wrong option); a traceback is a bug of ours. With ``--json`` standard
output carries exactly one JSON object.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tailbound import cli_bench, cli_compute
from tailbound.cli_compute import Json
from tailbound.errors import ConfigError, ShapeError, TailboundError

if TYPE_CHECKING:
    from tailbound.lab.crew import Progress

app = typer.Typer(
    help="Bound both tails of a synchronous PyTorch training step.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

cli_compute.add_commands(app)
cli_bench.add_commands(app)

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes, as shells have them."""
# Typer has its own copy of click in some releases, so click's name for this varies.
_UsageError: Any = typer.BadParameter.__base__


class _Terminated(BaseException):
    """SIGTERM came: clean up as for Ctrl-C."""


def main() -> None:
    """Entry point of the ``tailbound`` command."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. What goes wrong is one line on stderr."""
    try:
        code = app(arguments, prog_name="tailbound", standalone_mode=False)
        sys.stdout.flush()
        # Typer makes this code, or Abort in older releases, of KeyboardInterrupt.
        return _say("interrupted", code) if code == INTERRUPTED else code or 0
    except typer.Abort:
        return _say("interrupted", INTERRUPTED)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "tailbound"
        message = error.format_message().rstrip(".")
        return _say(f"{message}; see `{command} --help`", 2)
    except BrokenPipeError:
        # Who read our output has gone; Python's last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TailboundError, ConfigError, ShapeError, OSError) as error:
        return _say(str(error), 1)
    except _Terminated:
        return _say("terminated", TERMINATED)


def _say(message: str, code: int) -> int:
    print(f"tailbound: {' '.join(message.split())}", file=sys.stderr)
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise _Terminated


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = (
        False
    ),
) -> None:
    if version:
        from tailbound import __version__

        print(f"tailbound {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def demo(
    task: Annotated[
        str, typer.Option(help="digits, mnist1d, text or cifar10.")
    ] = "digits",
    data: Annotated[
        Path | None,
        typer.Option(help="Text file (text) or folder of binary files (cifar10)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Within 60 s.")] = False,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 3,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each run; default by task.")
    ] = None,
    rtt_ms: Annotated[
        float, typer.Option(help="Round-trip time in milliseconds.")
    ] = 1.0,
    loss: Annotated[float, typer.Option(help="Background loss, 0 to 1.")] = 0.02,
    burst: Annotated[float, typer.Option(help="Loss in a burst, 0 to 1.")] = 0.7,
    p_low: Annotated[
        float, typer.Option(help="Bound of the fixed run and the critical regime.")
    ] = 0.008,
    p_high: Annotated[
        float, typer.Option(help="Bound outside the critical regime.")
    ] = 0.408,
    mtu: Annotated[int, typer.Option(help="Bytes of an IP packet.")] = 1500,
    stragglers: Annotated[
        bool, typer.Option("--stragglers", help="Slow workers too: four runs.")
    ] = False,
    delay_ms: Annotated[
        float | None, typer.Option(help="Of a micro-batch without delay; default 4.")
    ] = None,
    preempt: Annotated[
        str | None, typer.Option(help="Cut in the backward, or at a micro_batch.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Micro-batches to drop at most, 0 to 1.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of model, data, losses, delays.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; default runs/demo-<time>.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a real model over a lossy network and show what the bounds do.

    Twice, with a fixed loss bound and an adaptive one; with --stragglers four times,
    with neither bound, the compute bound, the network bound, and both.
    """
    from tailbound.lab.demo import DemoOptions, run_demo

    options = DemoOptions(
        task=task,
        data=data,
        quick=quick,
        workers=workers,
        epochs=epochs,
        rtt_ms=rtt_ms,
        loss=loss,
        burst=burst,
        p_low=p_low,
        p_high=p_high,
        mtu=mtu,
        seed=seed,
        out=out,
        stragglers=stragglers,
        delay_ms=delay_ms,
        preempt=preempt,
        max_drop=max_drop,
    )
    with _shown_progress() as progress:
        summary, folder = run_demo(options, progress)
    if as_json:
        print(summary.to_json())
        return
    from rich.console import Console

    from tailbound.report.tails_table import make_outcome_table

    console = Console()
    console.print(make_outcome_table(summary))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


@app.command()
def serve(
    workers: Annotated[int, typer.Option(help="Workers of the job.")],
    bind: Annotated[
        str, typer.Option(help="Local address, or host:port, to listen on.")
    ] = "127.0.0.1:29400",
    mtu: Annotated[int | None, typer.Option(help="Bytes of an IP packet.")] = None,
    port_range: Annotated[
        str | None,
        typer.Option(help="UDP ports for the workers, FIRST-LAST; one for each."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Longest wait for a worker in a round.")
    ] = 60.0,
    join_timeout_s: Annotated[
        float, typer.Option(help="Longest wait for all workers to join.")
    ] = 3600.0,
    security: Annotated[
        str, typer.Option(help="session, authenticated or encrypted, as the workers'.")
    ] = "session",
    as_json: Json = False,
) -> None:
    """Run the server of a job as a process of its own.

    Workers join with Transport(plan="server", server="host:port").
    """
    import msgspec

    from tailbound.config import Security, Transport, format_address, parse_address
    from tailbound.transport.group import Server

    host, port = parse_address(
        bind if _has_port(bind) else format_address(bind.strip("[]"), 29400)
    )
    transport = Transport(
        mtu="auto" if mtu is None else mtu,
        port_range=None if port_range is None else _parse_range(port_range),
        timeout_s=timeout_s,
        secret=os.environ.get("TAILBOUND_SECRET") or None,
        security=cast("Security", security),
    )
    server = Server(
        workers,
        host=host,
        port=port,
        transport=transport,
        join_timeout_s=join_timeout_s,
    )
    told = f"serving {workers} workers at {server.address}"
    print(told, file=sys.stderr if as_json else sys.stdout, flush=True)
    server.run()
    counters = server.endpoint.counters()
    if as_json:
        told_json = {"address": server.address, "datagrams": asdict(counters)}
        print(msgspec.json.encode(told_json).decode())
    else:
        print(
            f"done: {counters.accepted} datagrams accepted, {counters.stale} stale, "
            f"{counters.foreign} foreign, {counters.malformed} malformed"
        )


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="A run folder.")],
    png: Annotated[
        Path | None, typer.Option(help="Also draw the plots into this picture.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rebuild summary.json and report.html of a run folder from its records."""
    from tailbound.report.build import build_report, read_run

    page = build_report(directory)
    summary, records = read_run(directory)
    if png is not None:
        from tailbound.report.build import draw_overview

        draw_overview(summary, records, png)
    if as_json:
        print(summary.to_json())
        return
    from rich.console import Console

    from tailbound.report.tails_table import make_outcome_table

    console = Console()
    console.print(make_outcome_table(summary))
    console.print(f"report: {page}", soft_wrap=True)


@app.command()
def doctor(
    host: Annotated[
        str | None,
        typer.Argument(
            help="Check the way to this host too, where `tailbound doctor --listen` "
            "runs; with --listen, the local address to listen at."
        ),
    ] = None,
    listen: Annotated[
        bool, typer.Option("--listen", help="Be the far end, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="The listener's TCP port; default 29499.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Longest wait for one answer of the host.")
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Say what this machine, and the way to another one, can carry.

    Each line is ok, slow (it works and costs time) or broken (training would fail),
    with what to do. Exit code 1 if anything is broken.
    """
    from tailbound.lab import doctor

    port = doctor.DEFAULT_PORT if port is None else port
    if listen:
        if as_json:
            raise ConfigError("--json goes with the checks, not with --listen")
        doctor.listen(host or "0.0.0.0", port)
        return
    checks = doctor.diagnose(host, port, timeout_s)
    if as_json:
        print(doctor.to_json(checks))
    else:
        from rich.console import Console

        Console().print(doctor.render(checks))
    raise typer.Exit(doctor.exit_code(checks))


def _parse_range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("-")
    if not (separator and first.isdecimal() and last.isdecimal()):
        raise ConfigError(
            f"--port-range is FIRST-LAST, such as 30000-30063, not {text!r}"
        )
    return int(first), int(last)


def _has_port(text: str) -> bool:
    return text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]" in text)


@contextmanager
def _shown_progress() -> "Iterator[Progress]":
    """Progress bars on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    from tailbound.lab.crew import Progress
    from tailbound.records import EpochReport, StepReport
    from tailbound.report.tails import NAMES

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
        redirect_stdout=False,
    )

    class Shown(Progress):
        def __init__(self) -> None:
            self.bar = bars.add_task("starting processes", total=None, state="")
            self.is_starting = True

        def begin(self, run: str, steps: int) -> None:
            if self.is_starting:
                bars.remove_task(self.bar)
                self.is_starting = False
                bars.start()
            name = NAMES.get(run, f"{run} bound")
            self.bar = bars.add_task(name, total=steps, state="")

        def step(self, run: str, report: StepReport) -> None:
            regime = "critical" if report.critical else "not critical"
            bars.update(self.bar, advance=1, state=f"p {report.p:.1%} ({regime})")

        def epoch(self, run: str, report: EpochReport) -> None:
            if not bars.console.is_terminal:
                bars.console.print(
                    f"{run}: epoch {report.epoch}, step {report.step}, "
                    f"{report.metric_name} {report.metric:.4f}"
                )

    shown = Shown()
    if bars.console.is_terminal:
        bars.start()
    try:
        yield shown
    finally:
        # A mistake found before anything runs is told in one line, alone.
        bars.live.transient = shown.is_starting
        if bars.live.is_started:
            bars.stop()


if __name__ == "__main__":
    main()

"""The demo: one server, three workers, a bad network; fixed bound against adaptive.

Trains a real model on real data twice over real sockets, with the same seeds: once
with a fixed loss bound (MLT) and once with the phase-aware one (DBLP). Writes
settings.json and rounds.jsonl as it goes, then summary.json and report.html.
"""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from tailbound.config import LossBound, require
from tailbound.errors import ConfigError, TailboundError
from tailbound.lab.children import Child, Children
from tailbound.lab.orders import (
    Broken,
    Conditions,
    Done,
    Ready,
    ServerOrder,
    WorkerOrder,
)
from tailbound.records import EpochReport, RecordWriter, RoundReport, StepReport
from tailbound.report.build import RECORDS, SETTINGS, build_report, read_run
from tailbound.report.outcome import RunSettings, Summary

T = TypeVar("T", Ready, Done)

START_TIMEOUT_S = 60.0
"""Importing torch in several processes at once on two cores can take this long."""
WINDOW = 5
"""Norms averaged by the detector. On small batches a single step's norm changes by
half in one of seven steps for no reason; a mean of five in one of two hundred."""
BURST_AT = (0.35, 0.75)
"""Where the two bursts strike, as shares of all steps: after the critical start."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a task trains."""

    epochs: int
    batch_size: int


SIZES: dict[str, tuple[Size, Size]] = {
    # full, quick
    "digits": (Size(30, 16), Size(8, 32)),
    "mnist1d": (Size(10, 32), Size(3, 32)),
    "text": (Size(1, 8), Size(1, 8)),
    "cifar10": (Size(2, 32), Size(1, 32)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user chose."""

    task: str = "digits"
    data: Path | None = None
    quick: bool = False
    workers: int = 3
    epochs: int | None = None
    rtt_ms: float = 1.0
    loss: float = 0.02
    burst: float = 0.7
    p_low: float = 0.008
    p_high: float = 0.408
    mtu: int = 1500
    seed: int = 0
    timeout_s: float = 30.0
    out: Path | None = None

    def __post_init__(self) -> None:
        require(
            self.task in SIZES,
            f"--task is one of {', '.join(SIZES)}, not {self.task!r}",
        )
        require(self.workers >= 2, f"--workers is 2 or more, not {self.workers}")
        require(
            self.epochs is None or self.epochs >= 1,
            f"--epochs is 1 or more, not {self.epochs}",
        )
        require(
            0.0 <= self.rtt_ms <= 1000.0,
            f"--rtt-ms is 0 to 1000 milliseconds, not {self.rtt_ms}",
        )
        for name, value in (("--loss", self.loss), ("--burst", self.burst)):
            require(0.0 <= value < 1.0, f"{name} is a share in [0, 1), not {value}")
        require(self.seed >= 0, f"--seed is 0 or more, not {self.seed}")


class Progress:
    """Told what happens; the command line shows it. Does nothing by itself."""

    def begin(self, run: str, steps: int) -> None:
        """A run starts."""

    def step(self, run: str, report: StepReport) -> None:
        """Rank 0 finished a step."""

    def epoch(self, run: str, report: EpochReport) -> None:
        """Rank 0 finished an epoch."""


def run_demo(
    options: DemoOptions, progress: Progress | None = None
) -> tuple[Summary, Path]:
    """Run both trainings and write the run folder.

    Args:
        options: what to run.
        progress: told of steps and epochs as they happen.

    Returns:
        The summary, and the folder.

    Raises:
        ConfigError: an option or the data is unusable.
        MissingExtraError: the demo's extra is not installed.
        TailboundError: a process of the demo failed; records so far are kept.
    """
    from tailbound.lab.tasks import load_task

    task = load_task(options.task, data=options.data)
    size = SIZES[options.task][1 if options.quick else 0]
    epochs = options.epochs or size.epochs
    per_epoch = task.steps_per_epoch(
        world_size=options.workers, batch_size=size.batch_size
    )
    steps = epochs * per_epoch
    conditions = Conditions(
        rtt_ms=options.rtt_ms,
        loss=options.loss,
        burst=options.burst,
        burst_rounds=tuple(max(1, round(share * steps)) for share in BURST_AT),
        mtu=options.mtu,
        seed=options.seed,
    )
    # The fixed run detects too, and ignores it: both pages show the same regimes.
    bounds = {
        run: LossBound(p_low=options.p_low, p_high=p_high, window=WINDOW)
        for run, p_high in (("fixed", options.p_low), ("adaptive", options.p_high))
    }
    detector = bounds["adaptive"]
    out = _make_folder(options.out)
    settings = RunSettings(
        task=options.task,
        workers=options.workers,
        epochs=epochs,
        batch_size=size.batch_size,
        seed=options.seed,
        rtt_ms=options.rtt_ms,
        loss=options.loss,
        burst=options.burst,
        burst_rounds=list(conditions.burst_rounds),
        p_low=options.p_low,
        p_high=options.p_high,
        mtu=options.mtu,
        detector=(
            f"mean norm of {detector.window} rounds changes by {detector.eta:.0%} or "
            f"more; asked every {detector.frequency} rounds"
        ),
        versions=_versions(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    (out / SETTINGS).write_bytes(msgspec.json.format(msgspec.json.encode(settings)))
    with RecordWriter(out / RECORDS) as write, Children() as children:
        crew = _Crew(children, options.workers, write, progress or Progress())
        crew.wait_ready()
        for run, bound in bounds.items():
            crew.run(
                ServerOrder(
                    run=run,
                    world_size=options.workers,
                    timeout_s=options.timeout_s,
                    conditions=conditions,
                ),
                lambda address, run=run, bound=bound: WorkerOrder(
                    run=run,
                    server=address,
                    task=options.task,
                    data=None if options.data is None else str(options.data),
                    epochs=epochs,
                    batch_size=size.batch_size,
                    bound=bound,
                    timeout_s=options.timeout_s,
                    conditions=conditions,
                ),
                steps,
            )
    build_report(out)
    return read_run(out)[0], out


class _Crew:
    """The demo's processes, and where their records go."""

    def __init__(
        self,
        children: Children,
        workers: int,
        write: RecordWriter,
        progress: Progress,
    ) -> None:
        self._children, self._write, self._progress = children, write, progress
        self._server = children.start("the server", "server", env={})
        self._workers = [
            children.start(
                f"rank {rank}",
                "worker",
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(workers),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(workers)
        ]

    def wait_ready(self) -> None:
        """Wait until every worker has imported what it needs."""
        self._wait(self._workers, Ready, START_TIMEOUT_S)

    def run(
        self,
        order: ServerOrder,
        make_worker_order: Callable[[str], WorkerOrder],
        steps: int,
    ) -> None:
        """Train one run to its end."""
        self._server.tell(order)
        ready = self._wait([self._server], Ready, START_TIMEOUT_S)[0]
        self._progress.begin(order.run, steps)
        for worker in self._workers:
            worker.tell(make_worker_order(ready.address))
        # Each wait of a process has its own deadline; this one only ends a demo whose
        # processes all stand still.
        self._wait([*self._workers, self._server], Done, 4 * order.timeout_s)

    def _wait(self, children: list[Child], kind: type[T], silence_s: float) -> list[T]:
        """Wait for an answer of this kind from each; records are written meanwhile."""
        answers: dict[str, T] = {}
        last_s = time.monotonic()
        while len(answers) < len(children):
            for child, answer in self._children.listen(1.0):
                last_s = time.monotonic()
                if isinstance(answer, kind):
                    answers[child.name] = answer
                elif isinstance(answer, Broken):
                    raise TailboundError(f"{child.name}: {answer.message}")
                elif isinstance(answer, RoundReport | StepReport | EpochReport):
                    self._take(answer)
            if time.monotonic() - last_s > silence_s:
                silent = [c.name for c in children if c.name not in answers]
                raise TailboundError(
                    f"{', '.join(silent)} said nothing for {silence_s:.0f} s"
                )
        return [answers[child.name] for child in children]

    def _take(self, record: RoundReport | StepReport | EpochReport) -> None:
        self._write(record)
        if record.rank == 0 and isinstance(record, StepReport):
            self._progress.step(record.run, record)
        elif record.rank == 0 and isinstance(record, EpochReport):
            self._progress.epoch(record.run, record)


def _make_folder(out: Path | None) -> Path:
    if out is None:
        out = Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / RECORDS).exists():
            raise ConfigError(
                f"{out} already holds a run; name another folder with --out"
            )
    except OSError as error:
        raise ConfigError(f"cannot make --out {out}: {error.strerror}") from error
    return out


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("tailbound", "torch", "numpy", "scikit-learn", "mnist1d"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["platform"] = f"{sys.platform} {platform.machine()}"
    return versions

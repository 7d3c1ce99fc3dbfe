"""The demo: one server, three workers, a bad network; what the bounds do.

Trains a real model on real data several times over real sockets, with the same seeds:
with a fixed loss bound (MLT) and with the phase-aware one (DBLP); or, with slow workers
besides, with neither bound, the compute bound, the network bound, and both. Writes
settings.json and rounds.jsonl as it goes, then summary.json and report.html.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import msgspec

from tailbound.config import ComputeBound, LossBound, Preempt, Transport, require
from tailbound.errors import ConfigError, MissingExtraError, TailboundError
from tailbound.lab.children import Children
from tailbound.lab.crew import Crew, Progress
from tailbound.lab.machine import versions
from tailbound.lab.orders import (
    Conditions,
    ServerOrder,
    WorkerOrder,
    decode_answer,
)
from tailbound.records import RecordWriter
from tailbound.report.build import (
    RECORDS,
    SETTINGS,
    Outcome,
    build_report,
    read_run,
)
from tailbound.report.outcome import RunSettings, Stragglers

WINDOW = 5
"""Norms averaged by the detector. On small batches a single step's norm changes by
half in one of seven steps for no reason; a mean of five in one of two hundred."""
MAX_WORKERS = 32
BURST_AT = (0.35, 0.75)
"""Where the two bursts strike, as shares of all steps: after the critical start."""
MICRO_BATCHES = 12
"""Of a worker's step with slow workers: the paper's accumulations."""
DELAY_MS, PREEMPT = 4.0, "backward"
MAX_DROP = {"micro_batch": 0.10, "backward": 0.12}
"""By ``preempt``. The choice of the threshold counts micro-batches that are finished;
``backward`` also keeps parts of others, and so really drops 7 to 9 % under 12 %."""
CALIBRATION = ((5, 20), (2, 12))
"""Steps of warm-up and of calibration before the threshold; full, quick."""


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
STRAGGLER_BATCHES = {"digits": 12, "mnist1d": 12, "text": 12, "cifar10": 48}
"""Samples of a worker's step with slow workers. One a micro-batch: the workers share
this machine's cores, and their own compute is to be short beside the delay."""
STRAGGLER_STEPS = (250, 60)
"""Steps that such a run has at least, in whole epochs; full, quick."""


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
    stragglers: bool = False
    """Slow workers, and four runs; what follows goes with it, None is the default."""
    delay_ms: float | None = None
    preempt: str | None = None
    max_drop: float | None = None

    def __post_init__(self) -> None:
        require(
            self.task in SIZES,
            f"--task is one of {', '.join(SIZES)}, not {self.task!r}",
        )
        # Each is a process of 300 MB that wants a core.
        require(
            2 <= self.workers <= MAX_WORKERS,
            f"--workers is 2 to {MAX_WORKERS}, not {self.workers}",
        )
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
        # Their own checks name the value; better now than in four processes.
        Transport(mtu=self.mtu, timeout_s=self.timeout_s)
        for name in ("delay_ms", "preempt", "max_drop"):
            require(
                self.stragglers or getattr(self, name) is None,
                f"--{name.replace('_', '-')} goes with --stragglers",
            )
        slow = self.slow_workers
        require(
            slow is None or 0.0 < slow.micro_batch_s <= 1.0,
            f"--delay-ms is above 0 and at most 1000 milliseconds, not {self.delay_ms}",
        )
        self.plan_runs()

    @property
    def batch_size(self) -> int:
        """Samples of one worker in one step."""
        if self.stragglers:
            return STRAGGLER_BATCHES[self.task]
        return SIZES[self.task][self.quick].batch_size

    @property
    def slow_workers(self) -> Stragglers | None:
        """How workers are slowed down; None: they are not."""
        if not self.stragglers:
            return None
        delay_ms = DELAY_MS if self.delay_ms is None else self.delay_ms
        preempt = PREEMPT if self.preempt is None else self.preempt
        require(
            preempt in MAX_DROP,
            f"--preempt is one of {', '.join(MAX_DROP)}, not {preempt!r}",
        )
        return Stragglers(
            micro_batches=MICRO_BATCHES,
            micro_batch_s=delay_ms / 1e3,
            max_drop=MAX_DROP[preempt] if self.max_drop is None else self.max_drop,
            preempt=preempt,
        )

    def plan_runs(self) -> dict[str, tuple[ComputeBound | None, LossBound]]:
        """The runs and their bounds, in order."""
        adaptive = LossBound(p_low=self.p_low, p_high=self.p_high, window=WINDOW)
        slow = self.slow_workers
        if slow is None:
            # The fixed run detects too, and ignores it: both show the same regimes.
            fixed = replace(adaptive, p_high=self.p_low)
            return {"fixed": (None, fixed), "adaptive": (None, adaptive)}
        warmup_steps, calibration_steps = CALIBRATION[self.quick]
        compute = ComputeBound(
            max_drop=slow.max_drop,
            warmup_steps=warmup_steps,
            calibration_steps=calibration_steps,
            preempt=cast(Preempt, slow.preempt),
        )
        whole = LossBound.fixed(0.0)
        return {
            "neither": (None, whole),
            "compute": (compute, whole),
            "network": (None, adaptive),
            "both": (compute, adaptive),
        }


def run_demo(
    options: DemoOptions, progress: Progress | None = None
) -> tuple[Outcome, Path]:
    """Train all runs and write the run folder.

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
    _require_plots()
    out = _choose_folder(options.out)
    with ExitStack() as stack:
        # They import torch while we do, and load the data.
        crew = Crew(stack.enter_context(Children(decode_answer)), options.workers)
        data = options.data
        if options.task == "mnist1d" and data is None:
            # Generating it takes seconds: once for all processes.
            data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        epochs, steps = _count(options, data)
        conditions = Conditions(
            rtt_ms=options.rtt_ms,
            loss=options.loss,
            burst=options.burst,
            burst_rounds=_burst_rounds(steps),
            mtu=options.mtu,
            seed=options.seed,
        )
        settings = _settings(options, epochs, conditions)
        write = stack.enter_context(_open_folder(out, settings))
        try:
            crew.wait_ready()
            for run, (compute, network) in options.plan_runs().items():
                crew.run(
                    ServerOrder(
                        run=run,
                        world_size=options.workers,
                        timeout_s=options.timeout_s,
                        conditions=conditions,
                    ),
                    WorkerOrder(
                        run=run,
                        task=options.task,
                        data=None if data is None else str(data),
                        epochs=epochs,
                        batch_size=options.batch_size,
                        bound=network,
                        compute=compute,
                        stragglers=options.slow_workers,
                        timeout_s=options.timeout_s,
                        conditions=conditions,
                    ),
                    steps=steps,
                    write=write,
                    progress=progress or Progress(),
                )
        except TailboundError as error:
            raise TailboundError(f"{error}; records so far: {write.path}") from error
    build_report(out)
    return read_run(out)[0], out


def _require_plots() -> None:
    """Say now, and not after the training, that the report cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            'the demo\'s report needs matplotlib; run: pip install "tailbound[demo]"'
        )


def _count(options: DemoOptions, data: Path | None) -> tuple[int, int]:
    """Epochs and steps of each run."""
    from tailbound.lab.tasks import load_task

    task = load_task(options.task, data=data)
    batch_size = options.batch_size
    most = task.num_train // batch_size
    require(
        options.workers <= most,
        f"--workers is at most {most} for the samples of {options.task}, "
        f"not {options.workers}",
    )
    steps = task.steps_per_epoch(world_size=options.workers, batch_size=batch_size)
    if not options.stragglers:
        epochs = options.epochs or SIZES[options.task][options.quick].epochs
        return epochs, epochs * steps
    epochs = options.epochs or -(-STRAGGLER_STEPS[options.quick] // steps)
    calibration = sum(CALIBRATION[options.quick])
    least = calibration // steps + 1
    require(
        epochs >= least,
        f"--epochs is at least {least} here, not {epochs}: an epoch has {steps} steps, "
        f"and the threshold comes after {calibration}",
    )
    return epochs, epochs * steps


def _burst_rounds(steps: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(share * steps)) for share in BURST_AT}))


def _choose_folder(out: Path | None) -> Path:
    """The folder for the run; nothing is made yet."""
    if out is None:
        return Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if (out / RECORDS).exists():
        raise ConfigError(f"{out} already holds a run; name another folder with --out")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no folder; name another one with --out")
    return out


def _open_folder(out: Path, settings: RunSettings) -> RecordWriter:
    """Make the folder, note the settings, and open the file for the records."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(settings))
        (out / SETTINGS).write_bytes(text)
        return RecordWriter(out / RECORDS)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {out} ({error.strerror}); name another folder with "
            "--out"
        ) from error


def _settings(options: DemoOptions, epochs: int, conditions: Conditions) -> RunSettings:
    _, detector = list(options.plan_runs().values())[-1]
    return RunSettings(
        task=options.task,
        workers=options.workers,
        epochs=epochs,
        batch_size=options.batch_size,
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
        stragglers=options.slow_workers,
        versions=versions("scikit-learn", "mnist1d"),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )

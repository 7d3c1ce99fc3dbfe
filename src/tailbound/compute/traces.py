"""Traces: how long each micro-batch of some steps took, read from files and written.

Three kinds of file: CSV (also ``.csv.gz``) and Parquet with the columns step, worker,
micro_batch and seconds, in any order and with others beside them; and the JSON lines
that a tailbound job writes. One file holds all workers, or each its own.
"""

import csv
import gzip
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.columns import NAMES, Columns, read_csv, read_parquet
from tailbound.compute.samples import Floats
from tailbound.errors import ConfigError
from tailbound.records import StepReport, read_lines

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]
AnyPath = Path | str

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".jsonl")
RECORDS = "rounds.jsonl"
"""The records in a run's folder."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Latencies of S steps, W workers and M micro-batches."""

    latency_s_SWM: Floats
    """Seconds; NaN where a threshold cut the step (records of a job only)."""
    comm_s_S: F64 | None
    """Communication time of each step: the shortest exchange of all ranks, since the
    others wait in theirs. None: not known."""
    workers: tuple[str, ...]
    """Their labels, sorted; by value if they are numbers."""
    steps: tuple[int, ...]
    """Their numbers, rising."""
    left_out_steps: int = 0
    """Steps of the files that not every worker has, or not with all micro-batches."""

    def without_first(self, num_steps: int) -> "Trace":
        """The trace without its first steps, in which caches and compilers settle.

        Raises:
            ConfigError: nothing would be left.
        """
        if not 0 <= num_steps < len(self.steps):
            raise ConfigError(
                f"cannot leave {num_steps} of {len(self.steps)} steps out; one must "
                "remain"
            )
        comm_s_S = self.comm_s_S
        return replace(
            self,
            latency_s_SWM=self.latency_s_SWM[num_steps:],
            comm_s_S=None if comm_s_S is None else comm_s_S[num_steps:],
            steps=self.steps[num_steps:],
        )


def read_trace(path: AnyPath, *, run: str | None = None) -> Trace:
    """Read a trace from a file, or from a folder's or a pattern's files.

    Args:
        path: a file, a folder, or a pattern such as ``traces/*.csv``.
        run: which run of a job's records, if they hold several.

    Raises:
        ConfigError, MissingExtraError: see :func:`read_traces`.
    """
    return read_traces([path], run=run)


def read_traces(paths: Sequence[AnyPath], *, run: str | None = None) -> Trace:
    """Read files that hold a trace together, such as one per worker.

    Steps at the end that not every file has are left out: workers do not stop at once.

    Args:
        paths: as for :func:`read_trace`.
        run: see there.

    Returns:
        The trace; every worker has every micro-batch of every step.

    Raises:
        ConfigError: a file is missing, unreadable or empty, has a hole, a duplicate or
            a time that is none, or there is one worker only; names the place.
        MissingExtraError: a Parquet file, and pyarrow is not installed.
    """
    files = find_files(paths)
    if all(path.name.endswith(".jsonl") for path in files):
        return _from_records(files, run)
    if run is not None:
        raise ConfigError(f"{files[0]} holds no runs to choose from; leave --run out")
    return _from_columns([_read_columns(path) for path in files])


def write_trace(path: AnyPath, trace: Trace) -> None:
    """Write a trace as CSV, gzipped if the name ends in ``.gz``.

    Raises:
        ConfigError: the name ends otherwise, the file cannot be written, or steps were
            cut: CSV cannot say so.
    """
    path = Path(path)
    if not path.name.endswith((".csv", ".csv.gz")):
        raise ConfigError(f"a trace is written as .csv or .csv.gz, not {path.name}")
    if np.isnan(trace.latency_s_SWM).any():
        raise ConfigError(f"{path}: steps that a threshold cut cannot be CSV")
    with io.StringIO(newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES)
        for step, latency_s_WM in zip(trace.steps, trace.latency_s_SWM, strict=True):
            for worker, latency_s_M in zip(trace.workers, latency_s_WM, strict=True):
                writer.writerows(
                    (step, worker, micro_batch, seconds)
                    for micro_batch, seconds in enumerate(latency_s_M.tolist())
                )
        data = file.getvalue().encode()
    try:
        # A time of its own would make each file of the same trace another one.
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def find_files(paths: Sequence[AnyPath]) -> list[Path]:
    """The files behind names, folders and patterns, each once.

    A run's folder stands for its records, any other for all traces in it.

    Raises:
        ConfigError: a name leads to nothing, or to a file of another kind.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = [path / RECORDS] if (path / RECORDS).is_file() else _traces_in(path)
        elif path.exists():
            found = [path]
        else:
            found = sorted(map(Path, glob(str(path))))
        if not found:
            what = "holds no trace" if path.is_dir() else "does not exist"
            raise ConfigError(f"{path} {what}; a trace is {', '.join(SUFFIXES)}")
        files += found
    for path in files:
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(
                f"{path} is no trace by its name; a trace is {', '.join(SUFFIXES)}"
            )
    if not files:
        raise ConfigError("no file given; name a trace")
    return list(dict.fromkeys(files))


def _traces_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(SUFFIXES) and path.is_file()
    )


def _read_columns(path: Path) -> Columns:
    if path.name.endswith(".jsonl"):
        raise ConfigError(f"{path} is a job's records; they do not mix with traces")
    return read_parquet(path) if path.suffix == ".parquet" else read_csv(path)


def _from_columns(parts: list[Columns]) -> Trace:
    for part in parts:
        _check_numbers(part)
    workers, worker_R = _sorted_labels(np.concatenate([p.worker_R for p in parts]))
    if len(workers) == 1:
        raise _one_worker(parts[0].path, workers[0])
    number_R = np.concatenate([part.step_R for part in parts]).astype(np.int64)
    kept_R = number_R <= min(int(part.step_R.max()) for part in parts)
    left_out = len(np.unique(number_R[~kept_R]))
    steps, step_R = np.unique(number_R[kept_R], return_inverse=True)
    number_R = np.concatenate([part.micro_batch_R for part in parts]).astype(np.int64)
    micro_batches, micro_batch_R = np.unique(number_R[kept_R], return_inverse=True)
    worker_R = worker_R[kept_R]
    order_R = np.lexsort((micro_batch_R, worker_R, step_R))
    place_3R = np.stack((step_R, worker_R, micro_batch_R))[:, order_R]
    shape = len(steps), len(workers), len(micro_batches)

    def name(place_3: Ints) -> str:
        step, worker, micro_batch = place_3
        return (
            f"step {steps[step]}, worker {workers[worker]}, micro-batch "
            f"{micro_batches[micro_batch]}"
        )

    twice_R = (place_3R[:, 1:] == place_3R[:, :-1]).all(axis=0)
    if twice_R.any():
        row = int(np.argmax(twice_R))
        rows = np.flatnonzero(kept_R)[order_R[row : row + 2]]
        first, second = (_place(parts, at) for at in sorted(rows.tolist()))
        raise ConfigError(
            f"{second}: {name(place_3R[:, row])} again, as in {first}; keep one"
        )
    if len(step_R) != math.prod(shape):
        raise ConfigError(
            f"{parts[0].path} has a hole: no {name(_first_hole(place_3R, shape))}, "
            "which others have; remove the step, or what goes beyond the hole"
        )
    seconds_R = np.concatenate([part.seconds_R for part in parts])[kept_R]
    latency_s_SWM = seconds_R[order_R].reshape(shape)
    return Trace(latency_s_SWM, None, workers, tuple(steps.tolist()), left_out)


def _place(parts: list[Columns], at: int) -> str:
    """Where the row stands that is the at-th of all files together."""
    number = 0
    while at >= len(parts[number].step_R):
        at -= len(parts[number].step_R)
        number += 1
    return parts[number].place(at)


def _check_numbers(part: Columns) -> None:
    """Steps and micro-batches are whole numbers, times finite and not negative."""
    for name, value_R in (("step", part.step_R), ("micro_batch", part.micro_batch_R)):
        # Beyond 2**53 a float64 no longer tells neighbours apart.
        bad_R = ~(np.abs(value_R) < 2.0**53) | (value_R != np.floor(value_R))
        if bad_R.any():
            row = int(np.argmax(bad_R))
            raise ConfigError(
                f"{part.place(row)}: {name} is a whole number, not {value_R[row]:g}"
            )
    bad_R = ~((part.seconds_R >= 0.0) & (part.seconds_R < math.inf))
    if bad_R.any():
        row = int(np.argmax(bad_R))
        raise ConfigError(
            f"{part.place(row)}: seconds are finite and not negative, not "
            f"{part.seconds_R[row]:g}; remove the step"
        )


def _sorted_labels(
    label_R: NDArray[np.generic],
) -> tuple[tuple[str, ...], Ints]:
    """The labels, sorted, and each row's place among them."""
    found, code_R = np.unique(label_R, return_inverse=True)
    labels = [str(label) for label in found]
    order = sorted(range(len(labels)), key=lambda at: _label_key(labels[at]))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return tuple(labels[at] for at in order), rank[code_R]


def _label_key(label: str) -> tuple[bool, float, str]:
    """Numbers by value, before all others by name."""
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    return not math.isfinite(value), value if math.isfinite(value) else 0.0, label


def _first_hole(place_3R: Ints, shape: tuple[int, int, int]) -> Ints:
    """The first place that no row has; rows are sorted, with none twice."""
    _, num_workers, num_micro_batches = shape
    row_R = np.arange(place_3R.shape[1] + 1)
    step_R, rest_R = np.divmod(row_R, num_workers * num_micro_batches)
    expected_3R = np.stack((step_R, *np.divmod(rest_R, num_micro_batches)))
    is_hole_R = np.append((place_3R != expected_3R[:, :-1]).any(axis=0), True)
    hole_3: Ints = expected_3R[:, np.argmax(is_hole_R)]
    return hole_3


def _one_worker(path: Path, worker: str) -> ConfigError:
    return ConfigError(
        f"{path} holds one worker ({worker}): nobody waits for it, so there is nothing "
        "to bound; give the traces of all workers"
    )


def _from_records(paths: list[Path], run: str | None) -> Trace:
    """Take the latencies out of a job's records."""
    reports = [
        report
        for path in paths
        for report in _read_steps(path)
        if run is None or report.run == run
    ]
    name = ", ".join(map(str, paths))
    runs = {report.run for report in reports}
    if run is not None and not reports:
        found = {report.run for path in paths for report in _read_steps(path)}
        raise ConfigError(f"{name} has no run {run!r}; it has {_quoted(found)}")
    if len(runs) > 1:
        raise ConfigError(
            f"{name} holds the runs {_quoted(runs)}; choose one with --run"
        )
    num_micro_batches = max((r.planned for r in reports if r.latency_s), default=0)
    if num_micro_batches == 0:
        raise ConfigError(
            f"{name} holds no latencies; they are recorded where a loop runs over "
            "job.micro_batches"
        )
    by_step: dict[int, dict[int, StepReport]] = defaultdict(dict)
    for report in reports:
        if report.rank in by_step[report.step]:
            raise ConfigError(
                f"{name}: rank {report.rank} has step {report.step} twice; did two "
                "runs write into one file? keep one"
            )
        by_step[report.step][report.rank] = report
    ranks = sorted({report.rank for report in reports})
    if len(ranks) == 1:
        raise _one_worker(paths[0], str(ranks[0]))
    whole = {
        step: by_rank
        for step, by_rank in sorted(by_step.items())
        if len(by_rank) == len(ranks)
        and all(r.planned == num_micro_batches for r in by_rank.values())
    }
    if not whole:
        raise ConfigError(f"{name}: no step has a record of each of {len(ranks)} ranks")
    latency_s_SWM = np.full((len(whole), len(ranks), num_micro_batches), np.nan)
    for latency_s_WM, by_rank in zip(latency_s_SWM, whole.values(), strict=True):
        for latency_s_M, rank in zip(latency_s_WM, ranks, strict=True):
            latency_s = by_rank[rank].latency_s[:num_micro_batches]
            latency_s_M[: len(latency_s)] = latency_s
    comm_s_S = np.array(
        [min(r.exchange_s for r in by_rank.values()) for by_rank in whole.values()]
    )
    return Trace(
        latency_s_SWM,
        comm_s_S,
        tuple(map(str, ranks)),
        tuple(whole),
        len(by_step) - len(whole),
    )


def _read_steps(path: Path) -> Iterable[StepReport]:
    try:
        yield from (r for r in read_lines(path) if isinstance(r, StepReport))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _quoted(runs: set[str]) -> str:
    return ", ".join(repr(run) for run in sorted(runs)) or "none"

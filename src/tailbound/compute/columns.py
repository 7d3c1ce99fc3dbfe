"""The rows of a trace file as four columns: CSV (also gzipped) and Parquet.

Who reads them may find any order, more columns, quotes and gaps; what is no number is
told with its line.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError, MissingExtraError

NAMES = ("step", "worker", "micro_batch", "seconds")
NUMBERS = ("step", "micro_batch", "seconds")
"""All but the worker, whose label may be any text."""

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """One file's rows (R), unchecked."""

    path: Path
    step_R: F64
    worker_R: NDArray[np.str_]
    micro_batch_R: F64
    seconds_R: F64

    def place(self, row: int) -> str:
        """Where a row stands in its file, for a message."""
        if self.path.suffix == ".parquet":
            return f"{self.path}, row {row + 1}"
        lines = enumerate(_read_text(self.path).splitlines()[1:], 2)
        numbers = [number for number, line in lines if line]
        return f"{self.path}, line {numbers[row]}"


def read_csv(path: Path) -> Columns:
    """Read a CSV file whose first line names its columns; ``.gz`` is unpacked.

    Raises:
        ConfigError: the file cannot be read, lacks a column or has no rows, or a line
            does not fit; names the line.
    """
    lines = _read_text(path).splitlines()
    if not lines:
        raise ConfigError(f"{path} is empty; it should begin with {','.join(NAMES)}")
    header = [name.strip() for name in next(csv.reader(lines[:1]))]
    _check_names(path, header)
    places = {name: header.index(name) for name in NAMES}
    rows = [line for line in lines[1:] if line]
    if not rows:
        raise ConfigError(f"{path} has column names and no rows; record some steps")
    settings: dict[str, Any] = {"delimiter": ",", "comments": None, "quotechar": '"'}
    try:
        number_R3 = np.loadtxt(
            rows, usecols=[places[name] for name in NUMBERS], ndmin=2, **settings
        )
        worker_R = np.loadtxt(
            rows, usecols=[places["worker"]], dtype=np.str_, ndmin=1, **settings
        )
    except ValueError as error:
        told = next(_misfits(lines, places), str(error))
        raise ConfigError(f"{path}, {told}") from error
    step_R, micro_batch_R, seconds_R = number_R3.T
    return Columns(path, step_R, np.char.strip(worker_R), micro_batch_R, seconds_R)


def read_parquet(path: Path) -> Columns:
    """Read a Parquet file.

    Raises:
        ConfigError: the file cannot be read, lacks a column or has no rows, or holds
            something else than numbers.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'a Parquet file needs pyarrow; run: pip install "tailbound[parquet]"'
        ) from error
    try:
        _check_names(path, parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=list(NAMES))
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {_first_line(error)}") from error
    if table.num_rows == 0:
        raise ConfigError(f"{path} has no rows; record some steps")
    for name in NAMES:
        if table[name].null_count:
            raise ConfigError(f"{path} has empty cells in column {name}; remove them")
    try:
        step_R, micro_batch_R, seconds_R = (
            table[name].to_numpy().astype(np.float64) for name in NUMBERS
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {', '.join(NUMBERS)} are numbers; {_first_line(error)}"
        ) from error
    worker_R = table["worker"].to_numpy().astype(np.str_)
    return Columns(path, step_R, worker_R, micro_batch_R, seconds_R)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        with io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig") as file:
            return file.read()
    except (EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} ends early or is damaged: {error}; copy it again"
        ) from error
    except gzip.BadGzipFile as error:
        raise ConfigError(
            f"{path} is not gzipped; if it is plain CSV, rename it to "
            f"{path.with_suffix('').name}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text (byte {error.start}); a trace is CSV in UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _check_names(path: Path, names: list[str]) -> None:
    missing = [name for name in NAMES if name not in names]
    if missing:
        raise ConfigError(
            f"{path} lacks the columns {', '.join(missing)}; it has "
            f"{', '.join(names)[:200]}"
        )


def _misfits(lines: list[str], places: dict[str, int]) -> Iterator[str]:
    """What is wrong with each line that does not fit."""
    needed = max(places.values()) + 1
    for number, line in enumerate(lines[1:], 2):
        cells = next(csv.reader([line]), [])
        if 0 < len(cells) < needed:
            yield f"line {number} has {len(cells)} of {needed} cells"
        elif cells:
            for name in NUMBERS:
                try:
                    float(cells[places[name]])
                except ValueError:
                    yield f"line {number}: {name} {cells[places[name]]!r} is no number"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

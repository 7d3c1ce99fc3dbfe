"""Trace files as columns: what is read, and one clear line for what is not."""

import builtins
import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tailbound.compute.columns import read_csv, read_parquet
from tailbound.errors import ConfigError, MissingExtraError

HEADER = "step,worker,micro_batch,seconds"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def told(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_csv(path)
    return str(caught.value)


def test_columns_may_stand_in_any_order_with_others_beside_them(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "a.csv",
        "seconds, host ,worker,step,micro_batch",
        '0.5,"a, b",w1,7,3',
        "0.25,c,w2,8,4",
    )

    columns = read_csv(path)

    assert columns.step_R.tolist() == [7, 8]
    assert columns.worker_R.tolist() == ["w1", "w2"]
    assert columns.micro_batch_R.tolist() == [3, 4]
    assert columns.seconds_R.tolist() == [0.5, 0.25]


def test_gzip_blank_lines_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(f"\ufeff{HEADER}\r\n\r\n1,0,0,0.5\r\n".encode()))

    columns = read_csv(path)

    assert columns.seconds_R.tolist() == [0.5]
    assert columns.place(0) == f"{path}, line 3"


def test_quoted_labels_are_taken_without_quotes_and_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, '0,"node 1, gpu 0",0,1', "0, b ,0,1")

    assert read_csv(path).worker_R.tolist() == ["node 1, gpu 0", "b"]


def test_missing_columns_are_named_and_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "step,rank,time", "0,0,1")

    assert told(path) == (
        f"{path} lacks the columns worker, micro_batch, seconds; it has step, rank, "
        "time"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0,0,1,fast", "seconds 'fast' is no number"),
        ("0,0,1,", "seconds '' is no number"),
        ("zero,0,1,0.5", "step 'zero' is no number"),
        ("0,0,1", "3 of 4 cells"),
    ],
)
def test_a_line_that_does_not_fit_is_told_with_its_number(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = write(tmp_path / "a.csv", HEADER, "0,0,0,0.5", "", line)

    assert told(path) in (
        f"{path}, line 4: {reason}",
        f"{path}, line 4 has {reason}",
    )


def test_what_only_numpy_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, "0,0,0,1_0")

    assert "1_0" in told(path)


def test_an_empty_file_says_how_it_should_begin(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"")

    assert told(path) == f"{path} is empty; it should begin with {HEADER}"


def test_a_file_without_rows_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, "")

    assert told(path) == f"{path} has column names and no rows; record some steps"


def test_plain_csv_called_gz_is_told_to_be_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", HEADER, "0,0,0,1")

    assert told(path) == (
        f"{path} is not gzipped; if it is plain CSV, rename it to a.csv"
    )


@pytest.mark.parametrize("keep", [20, 40])
def test_a_gzip_file_that_ends_early_is_told(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n0,0,0,1\n".encode())[:keep])

    assert told(path).startswith(f"{path} ends early or is damaged: ")


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"step\xff")

    assert told(path) == f"{path} is no text (byte 4); a trace is CSV in UTF-8"


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.mkdir()

    assert told(path) == f"cannot read {path}: Is a directory"


# -- Parquet ---------------------------------------------------------------------------


def parquet_file(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_parquet(path)
    return str(caught.value)


@pytest.mark.parametrize("workers", [[3, 12], ["3", "12"]])
def test_parquet_is_read_with_labels_of_either_type(
    tmp_path: Path, workers: list[Any]
) -> None:
    path = parquet_file(
        tmp_path / "a.parquet",
        other=["x", "y"],
        seconds=[0.5, 0.25],
        micro_batch=[0, 1],
        worker=workers,
        step=[7, 8],
    )

    columns = read_parquet(path)

    assert columns.step_R.tolist() == [7, 8]
    assert columns.worker_R.tolist() == ["3", "12"]
    assert columns.seconds_R.tolist() == [0.5, 0.25]
    assert columns.place(1) == f"{path}, row 2"


def test_a_parquet_file_without_a_column_names_what_it_has(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "a.parquet", step=[0], worker=[0], seconds=[1.0])

    assert refused(path) == (
        f"{path} lacks the columns micro_batch; it has step, worker, seconds"
    )


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"seconds": [None]}, "has empty cells in column seconds; remove them"),
        ({"worker": [None]}, "has empty cells in column worker; remove them"),
        ({"seconds": ["fast"]}, "could not convert string to float: 'fast'"),
    ],
)
def test_a_parquet_cell_that_is_no_number_is_told(
    tmp_path: Path, columns: dict[str, list[Any]], reason: str
) -> None:
    whole: dict[str, list[Any]] = {
        "step": [0],
        "worker": [0],
        "micro_batch": [0],
        "seconds": [1.0],
    }

    assert reason in refused(parquet_file(tmp_path / "a.parquet", **(whole | columns)))


def test_a_parquet_file_without_rows_is_told(tmp_path: Path) -> None:
    path = parquet_file(
        tmp_path / "a.parquet", step=[], worker=[], micro_batch=[], seconds=[]
    )

    assert refused(path) == f"{path} has no rows; record some steps"


def test_a_file_that_is_no_parquet_is_told_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", HEADER)

    message = refused(path)

    assert message.startswith(f"cannot read {path}: ")
    assert "\n" not in message


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_pyarrow(name: str, *rest: Any, **settings: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **settings)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)

    with pytest.raises(MissingExtraError, match=r'pip install "tailbound\[parquet\]"'):
        read_parquet(tmp_path / "a.parquet")

"""Records as JSON lines."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.records import (
    EpochReport,
    Record,
    RoundReport,
    StepReport,
    from_line,
    read_lines,
    to_line,
    write_lines,
)

ROUND = RoundReport(
    run="fixed",
    rank=1,
    step=2,
    counter=3,
    bucket=0,
    direction="in",
    p=0.008,
    critical=True,
    num_chunks=100,
    num_bytes=144_800,
    missing=0,
    sends=14,
    probes=14,
    sent=331,
    retransmitted=231,
    latency_s=0.0143,
    waiting_s=0.014,
    early_stop=False,
)
EPOCH = EpochReport(
    rank=0,
    epoch=1,
    step=93,
    metric=0.98,
    metric_name="accuracy",
    train_s=4.5,
    digest="c0ffee",
)


def make_step(**changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "rank": 2,
        "step": 7,
        "weight": 32.0,
        "total_weight": 96.0,
        "skipped": False,
        "compute_s": 0.01,
        "exchange_s": 0.002,
        "p": 0.408,
        "critical": False,
        "norm": 1.5,
        "ratio": 0.11,
        "verdict": "ratio 0.11 < 0.5: p 0.408",
        "missing_share": 0.25,
    }
    return StepReport(**fields | changes)


@pytest.mark.parametrize("record", [ROUND, make_step(loss=0.5), EPOCH])
def test_record_comes_back_from_its_line(record: Record) -> None:
    line = to_line(record)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert from_line(line) == record
    assert from_line(line.decode()) == record


@pytest.mark.parametrize(
    ("record", "kind"), [(ROUND, "round"), (make_step(), "step"), (EPOCH, "epoch")]
)
def test_line_is_plain_json_that_names_its_kind(record: Record, kind: str) -> None:
    line = json.loads(to_line(record))

    assert line["kind"] == kind
    assert set(line) == {"kind", *record.__struct_fields__}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_written_as_null_and_read_as_nan(
    value: float,
) -> None:
    step = make_step(norm=value, loss=value, ratio=value)
    epoch = EpochReport(
        rank=0,
        epoch=1,
        step=1,
        metric=value,
        metric_name="perplexity",
        train_s=1.0,
        digest="",
    )

    step_back, epoch_back = from_line(to_line(step)), from_line(to_line(epoch))

    assert json.loads(to_line(step))["norm"] is None
    assert isinstance(step_back, StepReport)
    assert isinstance(epoch_back, EpochReport)
    assert math.isnan(step_back.norm)
    assert step_back.loss is None
    assert step_back.ratio is None
    assert math.isnan(epoch_back.metric)


def test_a_field_that_a_later_version_added_is_passed_over() -> None:
    line = json.loads(to_line(EPOCH)) | {"added_later": [1, 2]}

    assert from_line(json.dumps(line)) == EPOCH


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "truncated"),
        ("no json", "malformed"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `kind`"),
        ('{"kind":"lap"}', "Invalid value 'lap'"),
        ('{"kind":"epoch"}', "missing required field `rank`"),
        ('{"kind":"epoch","rank":"zero"}', r"Expected `int`, got `str` - at `\$.rank`"),
        (b'{"kind":"epoch","run":"\xff"}', "Invalid UTF-8"),
        (
            to_line(ROUND).replace(b'"in"', b'"sideways"'),
            r"Invalid enum value 'sideways' - at `\$.direction`",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_the_reason(
    line: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"not a record: .*{message}"):
        from_line(line)


def test_file_gives_back_the_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    records: list[Record] = [ROUND, make_step(), EPOCH]

    write_lines(path, [EPOCH])
    write_lines(path, records)

    assert list(read_lines(path)) == records


def test_last_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(to_line(ROUND) + to_line(EPOCH)[:-10])

    assert list(read_lines(path)) == [ROUND]


def test_last_line_without_its_newline_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(to_line(ROUND) + to_line(EPOCH)[:-1])

    assert list(read_lines(path)) == [ROUND]


def test_empty_lines_are_passed_over_and_an_empty_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b"\n" + to_line(ROUND) + b" \n" + to_line(EPOCH))
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")

    assert list(read_lines(path)) == [ROUND, EPOCH]
    assert list(read_lines(empty)) == []


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(to_line(ROUND) + b"{}\n" + to_line(EPOCH))
    lines = read_lines(path)

    assert next(lines) == ROUND
    with pytest.raises(ConfigError, match=r"rounds\.jsonl:2: not a record"):
        next(lines)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_lines(tmp_path / "none.jsonl"))

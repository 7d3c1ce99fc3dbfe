"""Traces: joined, checked, and written; what is wrong with one is a clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailbound.compute.traces import (
    Trace,
    find_files,
    read_trace,
    read_traces,
    write_trace,
)
from tailbound.errors import ConfigError
from tailbound.records import EpochReport, Record, StepReport, write_lines

DATA = Path(__file__).parents[2].parent / "shared" / "data"
HEADER = "step,worker,micro_batch,seconds"


def write(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return path


def lines_of(worker: Any, steps: range, *, start: float = 1.0) -> list[str]:
    """Two micro-batches in each step; times rise by 1."""
    return [
        f"{step},{worker},{micro_batch},{start + 2 * number + micro_batch}"
        for number, step in enumerate(steps)
        for micro_batch in (0, 1)
    ]


def told(*paths: Path, run: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_traces(paths, run=run)
    return str(caught.value)


# -- CSV -------------------------------------------------------------------------------


def test_rows_in_any_order_become_steps_workers_and_micro_batches(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path / "a.csv",
        "17,9,5,0.8",
        "16,10,4,0.3",
        "17,9,4,0.7",
        "16,9,5,0.2",
        "17,10,5,0.6",
        "16,9,4,0.1",
        "17,10,4,0.5",
        "16,10,5,0.4",
    )

    trace = read_trace(path)

    assert trace.workers == ("9", "10")  # by value
    assert trace.steps == (16, 17)
    assert trace.latency_s_SWM.tolist() == [
        [[0.1, 0.2], [0.3, 0.4]],
        [[0.7, 0.8], [0.5, 0.6]],
    ]
    assert trace.comm_s_S is None
    assert trace.left_out_steps == 0


def test_labels_that_are_no_numbers_come_last_and_by_name(tmp_path: Path) -> None:
    labels = ("node-b", "10", "node-a", "2.5", "inf")
    path = write(tmp_path / "a.csv", *(f"0,{label},0,1" for label in labels))

    assert read_trace(path).workers == ("2.5", "10", "inf", "node-a", "node-b")


@pytest.mark.parametrize("value", ["-0.5", "nan", "inf"])
def test_a_time_that_is_none_is_told_with_its_line(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "a.csv", "0,0,0,1", "0,0,1,1", f"0,1,0,{value}", "0,1,1,1")

    assert told(path) == (
        f"{path}, line 4: seconds are finite and not negative, not {float(value):g}; "
        "remove the step"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0.5,1,0,1", "step is a whole number, not 0.5"),
        ("nan,1,0,1", "step is a whole number, not nan"),
        ("0,1,1e17,1", "micro_batch is a whole number, not 1e+17"),
    ],
)
def test_steps_and_micro_batches_are_whole_numbers(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = write(tmp_path / "a.csv", "0,0,0,1", line)

    assert told(path) == f"{path}, line 3: {reason}"


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (0, "step 3, worker 0, micro-batch 0"),
        (2, "step 4, worker 0, micro-batch 0"),
        (5, "step 3, worker 1, micro-batch 1"),
        (7, "step 4, worker 1, micro-batch 1"),
    ],
)
def test_a_hole_is_named(tmp_path: Path, gone: int, named: str) -> None:
    lines = lines_of(0, range(3, 5)) + lines_of(1, range(3, 5))
    path = write(tmp_path / "a.csv", *lines[:gone], *lines[gone + 1 :])

    assert told(path) == (
        f"{path} has a hole: no {named}, which others have; remove the step, or what "
        "goes beyond the hole"
    )


def test_a_duplicate_is_told_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "0,0,0,1", "0,1,0,1", "0,0,0,2")

    assert told(path) == (
        f"{path}, line 4: step 0, worker 0, micro-batch 0 again, as in {path}, line 2; "
        "keep one"
    )


def test_one_worker_is_nothing_to_bound(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "0,7,0,1", "0,7,1,1")

    assert told(path) == (
        f"{path} holds one worker (7): nobody waits for it, so there is nothing to "
        "bound; give the traces of all workers"
    )


# -- several files ---------------------------------------------------------------------


def test_a_file_for_each_worker_is_joined_and_the_unfinished_end_left_out(
    tmp_path: Path,
) -> None:
    write(tmp_path / "rank-0.csv", *lines_of(0, range(5, 9)))
    write(tmp_path / "rank-1.csv", *lines_of(1, range(5, 7), start=9.0))

    trace = read_trace(tmp_path)

    assert trace.workers == ("0", "1")
    assert trace.steps == (5, 6)
    assert trace.left_out_steps == 2
    assert trace.latency_s_SWM.tolist() == [
        [[1.0, 2.0], [9.0, 10.0]],
        [[3.0, 4.0], [11.0, 12.0]],
    ]


def test_the_same_worker_in_two_files_is_told_with_both_places(tmp_path: Path) -> None:
    one = write(tmp_path / "a.csv", "0,0,0,1")
    two = write(tmp_path / "b.csv", "0,1,0,1", "0,0,0,1")

    assert told(one, two) == (
        f"{two}, line 3: step 0, worker 0, micro-batch 0 again, as in {one}, line 2; "
        "keep one"
    )


def test_files_without_a_step_in_common_have_a_hole(tmp_path: Path) -> None:
    one = write(tmp_path / "a.csv", *lines_of(0, range(2)))
    two = write(tmp_path / "b.csv", *lines_of(1, range(5, 7)))

    assert "has a hole: no step 0, worker 1, micro-batch 0" in told(one, two)


def test_a_pattern_and_a_folder_stand_for_their_files(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv.gz", "c.parquet", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "deeper.csv").mkdir()

    assert [path.name for path in find_files([tmp_path])] == [
        "a.csv.gz",
        "b.csv",
        "c.parquet",
    ]
    assert find_files([tmp_path / "b*", str(tmp_path / "*b.csv")]) == [
        tmp_path / "b.csv"
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone.csv", "does not exist; a trace is .csv, .csv.gz, .parquet, .jsonl"),
        ("x*.csv", "does not exist; a trace is .csv, .csv.gz, .parquet, .jsonl"),
        (".", "holds no trace; a trace is .csv, .csv.gz, .parquet, .jsonl"),
        (
            "notes.txt",
            "is no trace by its name; a trace is .csv, .csv.gz, .parquet, .jsonl",
        ),
    ],
)
def test_a_name_that_leads_to_no_trace_is_told(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "notes.txt").touch()

    assert told(tmp_path / name) == f"{tmp_path / name} {reason}"


def test_no_name_at_all_is_told() -> None:
    assert told() == "no file given; name a trace"


# -- records of a job ------------------------------------------------------------------


def step(rank: int, number: int, *latency_s: float, **fields: Any) -> StepReport:
    defaults: dict[str, Any] = {
        "weight": 1.0,
        "total_weight": 2.0,
        "skipped": False,
        "compute_s": 0.1,
        "exchange_s": 0.5,
        "p": 0.0,
        "critical": True,
        "norm": 1.0,
        "ratio": None,
        "verdict": "",
        "missing_share": 0.0,
        "planned": 2,
        "latency_s": latency_s,
    }
    return StepReport(rank=rank, step=number, **(defaults | fields))


def records(path: Path, *reports: Record) -> Path:
    write_lines(path, reports)
    return path


def test_a_cut_step_has_holes_and_the_shortest_exchange_is_communication(
    tmp_path: Path,
) -> None:
    path = records(
        tmp_path / "rounds.jsonl",
        step(1, 1, 0.3, exchange_s=0.02),
        step(0, 1, 0.1, 0.2, exchange_s=0.5),
        step(0, 2, 0.4, 0.5, exchange_s=0.03),
        EpochReport(
            rank=0,
            epoch=1,
            step=2,
            metric=0.5,
            metric_name="accuracy",
            train_s=1.0,
            digest="",
        ),
        step(1, 2, exchange_s=0.6),
    )

    trace = read_trace(tmp_path)  # a run's folder stands for its records

    assert trace.workers == ("0", "1")
    assert trace.steps == (1, 2)
    np.testing.assert_array_equal(
        trace.latency_s_SWM,
        [[[0.1, 0.2], [0.3, np.nan]], [[0.4, 0.5], [np.nan, np.nan]]],
    )
    assert trace.comm_s_S is not None
    assert trace.comm_s_S.tolist() == [0.02, 0.03]
    np.testing.assert_array_equal(read_trace(path).latency_s_SWM, trace.latency_s_SWM)


def test_steps_that_a_rank_lacks_or_that_were_shorter_are_left_out(
    tmp_path: Path,
) -> None:
    path = records(
        tmp_path / "a.jsonl",
        *(step(rank, 1, 0.1, 0.2) for rank in (0, 1)),
        *(step(rank, 2, 0.1, planned=1) for rank in (0, 1)),  # an epoch's end
        step(0, 3, 0.1, 0.2),
    )

    trace = read_trace(path)

    assert trace.steps == (1,)
    assert trace.left_out_steps == 2


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    path = records(
        tmp_path / "a.jsonl",
        *(step(rank, 1, 0.1, 0.2, run="neither") for rank in (0, 1)),
        *(step(rank, 1, 0.3, 0.4, run="both") for rank in (0, 1)),
    )

    assert read_trace(path, run="both").latency_s_SWM[0, 0].tolist() == [0.3, 0.4]
    assert told(path) == (
        f"{path} holds the runs 'both', 'neither'; choose one with --run"
    )
    assert told(path, run="bth") == (
        f"{path} has no run 'bth'; it has 'both', 'neither'"
    )


def test_records_of_each_rank_in_its_own_file_are_joined(tmp_path: Path) -> None:
    for rank in (0, 1):
        records(tmp_path / f"rank-{rank}.jsonl", step(rank, 1, 0.1, 0.2))

    assert read_trace(tmp_path / "*.jsonl").workers == ("0", "1")


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        (
            [step(0, 1, planned=0), step(1, 1, planned=0)],
            " holds no latencies; they are recorded where a loop runs over "
            "job.micro_batches",
        ),
        (
            [step(0, 1, 0.1, 0.2), step(0, 1, 0.1, 0.2)],
            ": rank 0 has step 1 twice; did two runs write into one file? keep one",
        ),
        (
            [step(0, 1, 0.1, 0.2)],
            " holds one worker (0): nobody waits for it, so there is nothing to bound; "
            "give the traces of all workers",
        ),
        (
            [step(0, 1, 0.1, 0.2), step(1, 2, 0.1, 0.2)],
            ": no step has a record of each of 2 ranks",
        ),
    ],
)
def test_records_that_are_no_trace_are_told(
    tmp_path: Path, reports: list[Record], reason: str
) -> None:
    path = records(tmp_path / "a.jsonl", *reports)

    assert told(path) == f"{path}{reason}"


def test_records_do_not_mix_with_traces_and_traces_have_no_runs(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", step(0, 1, 0.1, 0.2))
    csv = write(tmp_path / "b.csv", "0,0,0,1", "0,1,0,1")

    assert told(csv, path) == f"{path} is a job's records; they do not mix with traces"
    assert told(csv, run="fixed") == (
        f"{csv} holds no runs to choose from; leave --run out"
    )


def test_a_line_that_is_no_record_is_told_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n", encoding="utf-8")

    assert told(path).startswith(f"{path}:1: not a record: ")


def test_records_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to("/proc/self/mem")

    assert told(path) == f"cannot read {path}: Input/output error"


# -- writing, and parts of a trace ---------------------------------------------------


TRACE = Trace(
    np.array([[[0.1, 1 / 3], [2.0, 3e-9]], [[1.0, 2.0], [3.0, 4.0]]]),
    None,
    ("0", "node 1, gpu 2"),
    (4, 8),
)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_what_is_written_is_read_back_exactly(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path / name, TRACE)

    trace = read_trace(tmp_path / name)

    assert trace.latency_s_SWM.tolist() == TRACE.latency_s_SWM.tolist()
    assert (trace.workers, trace.steps) == (TRACE.workers, TRACE.steps)
    first = (tmp_path / name).read_bytes()
    write_trace(tmp_path / name, TRACE)
    assert (tmp_path / name).read_bytes() == first


def test_what_csv_cannot_hold_is_not_written(tmp_path: Path) -> None:
    cut = Trace(np.full((1, 2, 1), np.nan), None, ("0", "1"), (0,))

    for path, trace, reason in (
        (tmp_path / "a.json", TRACE, "a trace is written as .csv or .csv.gz"),
        (tmp_path / "a.csv", cut, "steps that a threshold cut cannot be CSV"),
        (tmp_path / "gone" / "a.csv", TRACE, "No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            write_trace(path, trace)


def test_the_first_steps_can_be_left_out(tmp_path: Path) -> None:
    later = TRACE.without_first(1)

    assert later.steps == (8,)
    assert later.latency_s_SWM.tolist() == [[[1.0, 2.0], [3.0, 4.0]]]
    assert later.comm_s_S is None
    assert TRACE.without_first(0).steps == (4, 8)


def test_communication_goes_with_its_steps() -> None:
    trace = Trace(np.ones((3, 2, 1)), np.array([0.1, 0.2, 0.3]), ("0", "1"), (1, 2, 3))

    rest_s_S = trace.without_first(1).comm_s_S

    assert rest_s_S is not None
    assert rest_s_S.tolist() == [0.2, 0.3]


@pytest.mark.parametrize("num_steps", [-1, 2])
def test_one_step_must_remain(num_steps: int) -> None:
    with pytest.raises(ConfigError, match=r"one must remain"):
        TRACE.without_first(num_steps)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bytedance_se", (43, 32, 8)),
        ("bytedance_ar", (44, 4, 32)),
        ("pai_job_1", (25, 10, 12)),
        ("pai_job_2", (19, 10, 12)),
        ("pai_job_4", (181, 10, 12)),
    ],
)
def test_a_real_trace_is_read_whole(name: str, shape: tuple[int, int, int]) -> None:
    assert read_trace(DATA / f"{name}.csv.gz").latency_s_SWM.shape == shape

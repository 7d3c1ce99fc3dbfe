"""The demo: its options, its folder, a whole run, and a run that loses a process."""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lab.launched import children_of, is_running, kill
from tailbound.compute.noise import DelayModel
from tailbound.config import ComputeBound, LossBound
from tailbound.errors import ConfigError, MissingExtraError, TailboundError
from tailbound.lab import datasets
from tailbound.lab.crew import Progress
from tailbound.lab.demo import (
    SIZES,
    STRAGGLER_BATCHES,
    DemoOptions,
    run_demo,
)
from tailbound.lab.tasks import TASKS
from tailbound.records import (
    EpochReport,
    RoundReport,
    StepReport,
    ThresholdReport,
    read_lines,
)
from tailbound.report.outcome import RunSettings, Stragglers


@dataclass
class Told(Progress):
    """Keeps what it was told; kills a process at a step, if so asked."""

    kills: str = ""
    begun: list[tuple[str, int]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    epochs: list[tuple[str, int]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    killed_s: float = 0.0

    def begin(self, run: str, steps: int) -> None:
        self.begun.append((run, steps))
        self.processes |= children_of(os.getpid())

    def step(self, run: str, report: StepReport) -> None:
        self.steps[run] = report.step
        if self.kills and report.step == 3:
            self.killed_s = time.monotonic()
            kill(self.kills, signal.SIGKILL)

    def epoch(self, run: str, report: EpochReport) -> None:
        self.epochs.append((run, report.epoch))


# -- options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"task": "digit"}, "--task is one of digits, mnist1d, text, cifar10, not"),
        ({"workers": 1}, "--workers is 2 to 32, not 1"),
        ({"workers": 33}, "--workers is 2 to 32, not 33"),
        ({"epochs": 0}, "--epochs is 1 or more, not 0"),
        ({"rtt_ms": -1.0}, "--rtt-ms is 0 to 1000 milliseconds, not -1"),
        ({"rtt_ms": float("nan")}, "--rtt-ms is 0 to 1000 milliseconds, not nan"),
        ({"loss": 1.0}, r"--loss is a share in \[0, 1\), not 1.0"),
        ({"burst": -0.1}, r"--burst is a share in \[0, 1\), not -0.1"),
        ({"p_low": 1.5}, r"p_low is a share in \[0, 1\), not 1.5"),
        ({"p_low": 0.5}, r"p_high is a share in \[p_low=0.5, 1\), not 0.408"),
        ({"mtu": 100}, "mtu is 'auto' or 576 to 65535 bytes, not 100"),
        ({"seed": -1}, "--seed is 0 or more, not -1"),
        ({"timeout_s": 0.0}, "timeout_s is a positive number of seconds, not 0.0"),
        ({"delay_ms": 4.0}, "--delay-ms goes with --stragglers"),
        ({"preempt": "backward"}, "--preempt goes with --stragglers"),
        ({"max_drop": 0.1}, "--max-drop goes with --stragglers"),
        (
            {"stragglers": True, "delay_ms": 0.0},
            "--delay-ms is above 0 and at most 1000 milliseconds, not 0.0",
        ),
        (
            {"stragglers": True, "delay_ms": float("nan")},
            "--delay-ms is above 0 and at most 1000 milliseconds, not nan",
        ),
        (
            {"stragglers": True, "preempt": "forward"},
            "--preempt is one of micro_batch, backward, not 'forward'",
        ),
        (
            {"stragglers": True, "max_drop": 1.5},
            r"max_drop is a share in \[0, 1\], not 1.5",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoOptions(**option)


def test_every_task_has_its_sizes() -> None:
    assert tuple(SIZES) == tuple(STRAGGLER_BATCHES) == TASKS
    assert all(full.epochs >= quick.epochs for full, quick in SIZES.values())


def test_slow_workers_take_one_sample_a_micro_batch_and_as_long_as_asked() -> None:
    options = DemoOptions(stragglers=True, delay_ms=2.5)

    assert options.batch_size == 12
    assert options.slow_workers == Stragglers(
        micro_batches=12, micro_batch_s=0.0025, max_drop=0.12, preempt="backward"
    )
    assert DemoOptions().slow_workers is None


@pytest.mark.parametrize(
    ("preempt", "max_drop"), [("micro_batch", 0.10), ("backward", 0.12)]
)
def test_more_may_be_left_unfinished_where_parts_of_it_are_kept(
    preempt: str, max_drop: float
) -> None:
    slow = DemoOptions(stragglers=True, preempt=preempt).slow_workers

    assert slow is not None
    assert slow.max_drop == max_drop


def test_slow_workers_are_met_with_neither_bound_with_each_and_with_both() -> None:
    options = DemoOptions(stragglers=True, preempt="micro_batch", max_drop=0.2)
    compute = ComputeBound(max_drop=0.2)
    whole, adaptive = LossBound.fixed(0.0), LossBound(window=5)

    assert options.plan_runs() == {
        "neither": (None, whole),
        "compute": (compute, whole),
        "network": (None, adaptive),
        "both": (compute, adaptive),
    }


# -- before the first process ----------------------------------------------------------


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text("kept")

    with pytest.raises(ConfigError, match="already holds a run; name another folder"):
        run_demo(DemoOptions(out=tmp_path))

    assert (tmp_path / "rounds.jsonl").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["rounds.jsonl"]


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")

    with pytest.raises(ConfigError, match="out is no folder; name another one"):
        run_demo(DemoOptions(out=tmp_path / "out"))


def test_without_matplotlib_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(
        MissingExtraError, match=r'run: pip install "tailbound\[demo\]"'
    ):
        run_demo(DemoOptions(out=tmp_path / "out"))

    assert not (tmp_path / "out").exists()


# -- before the training ------------------------------------------------------------


@pytest.mark.processes
def test_without_scikit_learn_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(MissingExtraError, match="'digits' needs scikit-learn; run:"):
        run_demo(DemoOptions(out=tmp_path / "out"))

    assert not (tmp_path / "out").exists()
    assert children_of(os.getpid()) == {}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing.txt", r"cannot read .*missing.txt \(No such file or directory\)"),
        (".", r"\(Is a directory\); expected a text file"),
        ("short.txt", "short.txt has 10 bytes; the text task needs"),
        ("small.txt", "--workers is at most 1 for the samples of text, not 3"),
    ],
)
def test_data_that_cannot_be_used_is_named(
    tmp_path: Path, data: str, message: str
) -> None:
    (tmp_path / "short.txt").write_bytes(b"0123456789")
    (tmp_path / "small.txt").write_bytes(bytes(range(97, 122)) * 40)

    with pytest.raises(ConfigError, match=message):
        run_demo(DemoOptions(task="text", data=tmp_path / data, out=tmp_path / "out"))

    assert not (tmp_path / "out").exists()
    assert children_of(os.getpid()) == {}


@pytest.mark.processes
def test_a_threshold_needs_more_steps_than_its_calibration(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 300)
    options = DemoOptions(
        stragglers=True,
        task="text",
        data=text,
        workers=2,
        epochs=1,
        out=tmp_path / "out",
    )

    with pytest.raises(
        ConfigError,
        match="--epochs is at least 2 here, not 1: an epoch has 16 steps, and the "
        "threshold comes after 25",
    ):
        run_demo(options)

    assert not (tmp_path / "out").exists()
    assert children_of(os.getpid()) == {}


@pytest.mark.processes
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """Not even root makes one under /proc."""
    with pytest.raises(ConfigError, match=r"cannot write into /proc/run .* --out"):
        run_demo(DemoOptions(task="text", out=Path("/proc/run")))

    assert children_of(os.getpid()) == {}


@pytest.mark.processes
def test_without_a_name_the_folder_is_named_after_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("in the way")

    with pytest.raises(ConfigError, match=r"into runs/demo-\d{8}-\d{6} \(Not a dir"):
        run_demo(DemoOptions(task="text"))


# -- whole runs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    summary: Any
    folder: Path
    told: Told


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two workers, one epoch of 22 steps, no added delay."""
    told = Told()
    options = DemoOptions(
        quick=True,
        workers=2,
        epochs=1,
        rtt_ms=0.0,
        out=tmp_path_factory.mktemp("runs") / "a" / "b",
    )
    return Outcome(*run_demo(options, told), told)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
class TestAWholeRun:
    def test_it_leaves_four_files(self, outcome: Outcome) -> None:
        assert sorted(os.listdir(outcome.folder)) == [
            "report.html",
            "rounds.jsonl",
            "settings.json",
            "summary.json",
        ]

    def test_it_says_how_it_was_made(self, outcome: Outcome) -> None:
        text = (outcome.folder / "settings.json").read_bytes()
        settings = msgspec.json.decode(text, type=RunSettings)

        assert (settings.task, settings.workers, settings.epochs) == ("digits", 2, 1)
        assert settings.burst_rounds == [8, 16]  # at 35 % and 75 % of 22 steps
        assert (settings.p_low, settings.p_high) == (0.008, 0.408)
        assert settings.versions["torch"]

    def test_both_runs_train_all_steps_on_every_rank(self, outcome: Outcome) -> None:
        records = list(read_lines(outcome.folder / "rounds.jsonl"))

        for run in ("fixed", "adaptive"):
            for rank in (0, 1):
                own = [one for one in records if (one.run, one.rank) == (run, rank)]
                steps = [one.step for one in own if isinstance(one, StepReport)]
                ways = [one.direction for one in own if isinstance(one, RoundReport)]
                assert steps == list(range(1, 23))
                assert ways == 22 * ["in", "back"]
                assert len([one for one in own if isinstance(one, EpochReport)]) == 1

    def test_the_way_back_is_exact_and_the_way_in_within_its_bound(
        self, outcome: Outcome
    ) -> None:
        rounds = [
            one
            for one in read_lines(outcome.folder / "rounds.jsonl")
            if isinstance(one, RoundReport)
        ]

        assert all(one.missing <= one.p * one.num_chunks for one in rounds)
        assert {one.missing for one in rounds if one.direction == "back"} == {0}
        assert {one.p for one in rounds if one.run == "fixed"} <= {0.0, 0.008}
        assert max(one.missing for one in rounds) > 0

    def test_it_sums_up_both_runs(self, outcome: Outcome) -> None:
        fixed, adaptive = outcome.summary.fixed, outcome.summary.adaptive

        assert fixed is not None
        assert adaptive is not None
        assert fixed.identical
        assert adaptive.identical
        assert (fixed.steps, adaptive.steps) == (22, 22)
        assert fixed.metric is not None
        assert fixed.metric > 0.3
        assert len(outcome.summary.ratio.burst) == 2

    def test_it_tells_how_it_goes(self, outcome: Outcome) -> None:
        assert outcome.told.begun == [("fixed", 22), ("adaptive", 22)]
        assert outcome.told.steps == {"fixed": 22, "adaptive": 22}
        assert outcome.told.epochs == [("fixed", 1), ("adaptive", 1)]

    def test_its_processes_have_ended(self, outcome: Outcome) -> None:
        processes = outcome.told.processes

        assert sorted(processes.values()) == ["rank 0", "rank 1", "server"]
        assert not any(is_running(pid) for pid in processes)


@pytest.fixture(scope="module")
def slow_outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two slow workers, an epoch of 59 steps, of which 14 are not bounded."""
    told = Told()
    options = DemoOptions(
        stragglers=True,
        delay_ms=1.0,
        quick=True,
        workers=2,
        epochs=1,
        rtt_ms=0.0,
        out=tmp_path_factory.mktemp("runs") / "slow",
    )
    return Outcome(*run_demo(options, told), told)


STRAGGLER_RUNS = ("neither", "compute", "network", "both")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
class TestSlowWorkers:
    def test_all_four_runs_train_all_steps_on_every_rank(
        self, slow_outcome: Outcome
    ) -> None:
        records = list(read_lines(slow_outcome.folder / "rounds.jsonl"))

        assert slow_outcome.told.begun == [(run, 59) for run in STRAGGLER_RUNS]
        for run in STRAGGLER_RUNS:
            for rank in (0, 1):
                own = [one for one in records if (one.run, one.rank) == (run, rank)]
                steps = [one for one in own if isinstance(one, StepReport)]
                assert [one.step for one in steps] == list(range(1, 60))
                assert {one.planned for one in steps} == {12}

    def test_a_threshold_is_chosen_after_the_calibration_and_reviewed_at_the_end(
        self, slow_outcome: Outcome
    ) -> None:
        decided: dict[tuple[str, int], list[int]] = {}
        for one in read_lines(slow_outcome.folder / "rounds.jsonl"):
            if isinstance(one, ThresholdReport):
                decided.setdefault((one.run, one.rank), []).append(one.step)

        assert decided.keys() == {
            (run, rank) for run in ("compute", "both") for rank in (0, 1)
        }
        # On a busy machine more may be dropped than expected: then once more between.
        assert all((steps[0], steps[-1]) == (14, 59) for steps in decided.values())

    def test_only_bounded_runs_drop_and_only_with_a_threshold(
        self, slow_outcome: Outcome
    ) -> None:
        for one in read_lines(slow_outcome.folder / "rounds.jsonl"):
            if isinstance(one, StepReport):
                may_drop = one.run in ("compute", "both") and one.step > 14
                assert may_drop or one.computed == one.planned
                assert may_drop or one.threshold_s is None

    def test_without_the_network_bound_every_chunk_arrives(
        self, slow_outcome: Outcome
    ) -> None:
        lost = {
            one.run: one.missing
            for one in read_lines(slow_outcome.folder / "rounds.jsonl")
            if isinstance(one, RoundReport) and one.missing
        }

        assert lost.keys() == {"network", "both"}

    def test_a_rank_is_slowed_down_alike_in_every_run(
        self, slow_outcome: Outcome
    ) -> None:
        """No step before the threshold is shorter than the draws of its rank say."""
        eps = DelayModel(0.001).sample(np.random.default_rng([0, 1]), (14, 12))
        least_s = 0.012 + eps.sum(axis=1)

        unbounded = [
            one
            for one in read_lines(slow_outcome.folder / "rounds.jsonl")
            if isinstance(one, StepReport) and one.rank == 1 and one.step <= 14
        ]

        assert {one.run for one in unbounded} == set(STRAGGLER_RUNS)
        for one in unbounded:
            # The first begins to wait a moment before its time is taken.
            assert sum(one.latency_s) > least_s[one.step - 1] - 1e-3

    def test_it_says_how_workers_were_slowed_down(self, slow_outcome: Outcome) -> None:
        text = (slow_outcome.folder / "settings.json").read_bytes()
        settings = msgspec.json.decode(text, type=RunSettings)

        assert settings.stragglers == Stragglers(
            micro_batches=12, micro_batch_s=0.001, max_drop=0.12, preempt="backward"
        )
        assert (settings.batch_size, settings.epochs) == (12, 1)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize(
    ("role", "told"),
    [
        ("server", "the server at 127.0.0.1:"),
        ("rank 1", "rank 1 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_killed_process_ends_the_run_and_keeps_its_records(
    tmp_path: Path, role: str, told: str
) -> None:
    progress = Told(kills=role)
    text = tmp_path / "text"  # 97 steps, and no scikit-learn to import
    text.write_bytes(bytes(range(32, 127)) * 1200)
    options = DemoOptions(task="text", data=text, workers=2, out=tmp_path / "out")

    with pytest.raises(TailboundError) as caught:
        run_demo(options, progress)

    assert time.monotonic() - progress.killed_s < 10.0
    message = str(caught.value)
    assert message.startswith(told)
    assert "was killed by signal 9 (SIGKILL)" in message
    assert message.endswith(f"; records so far: {tmp_path / 'out' / 'rounds.jsonl'}")
    assert len(message.splitlines()) == 1
    steps = {one.step for one in read_lines(tmp_path / "out" / "rounds.jsonl")}
    assert {1, 2, 3} <= steps
    assert len(progress.processes) == 3
    assert not any(is_running(pid) for pid in progress.processes)

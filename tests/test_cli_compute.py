"""``tailbound plan`` and ``simulate``: options, JSON, and one line for mistakes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailbound.cli import run
from tailbound.compute.traces import Trace, write_trace

DATA = Path(__file__).parents[1].parent / "shared" / "data"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four workers with a moving tail."""
    rng = np.random.default_rng(0)
    latency_s_SWM = 0.1 + 0.05 * rng.lognormal(0.0, 1.0, (24, 4, 4))
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    steps = tuple(range(24))
    write_trace(path, Trace(latency_s_SWM, None, ("0", "1", "2", "3"), steps))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = run([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that a command prints, alone."""
    code, out, errors = told(capsys, *arguments, "--json")
    assert (code, errors) == (0, "")
    decoded: dict[str, Any] = json.loads(out)
    return decoded


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_command_explains_itself(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, errors = told(capsys, command, "--help")

    assert (code, errors) == (0, "")
    assert out.startswith(f"Usage: tailbound {command} [OPTIONS]")
    assert "--json" in out


# -- plan ------------------------------------------------------------------------------


def test_a_plan_is_told_in_words_with_a_line_to_paste(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    code, out, errors = told(capsys, "plan", str(trace))

    assert (code, errors) == (0, "")
    assert out.startswith("DropCompute would get ")
    assert "The communication time is not known and counts as 0" in out
    assert out.splitlines()[-1] == (  # unbroken, for pasting
        "Write: tailbound.attach(model, optimizer, micro_batches=4, "
        'compute=tailbound.ComputeBound(threshold_s="auto", max_drop=0.1, '
        'preempt="backward"))'
    )


def test_a_plan_as_json_is_one_object(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    found = numbers(capsys, "plan", str(trace))

    assert found["speedup"] > 1.05
    assert found["dropped_share"] <= 0.10
    assert found["num_steps"] == 24
    assert [one["num_workers"] for one in found["estimates"]] == [2, 8, 16, 4, 4]


def test_the_options_reach_the_plan(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    options = ("--comm-time", "0.5", "--max-drop", "0.05", "--skip", "4")
    sizes = ("--workers", "8, 16", "--micro-batches", "2")

    found = numbers(capsys, "plan", str(trace), *options, *sizes)

    assert (found["comm_s"], found["is_comm_known"]) == (0.5, True)
    assert found["max_drop"] == 0.05
    assert found["num_steps"] == 20
    assert [
        (one["num_workers"], one["num_micro_batches"]) for one in found["estimates"]
    ] == [(8, 2), (16, 2)]


@pytest.mark.slow
def test_out_gets_a_page_and_pictures(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    code, out, _ = told(capsys, "plan", str(trace), "--out", str(tmp_path / "plan"))

    page = tmp_path / "plan" / "plan.html"
    assert code == 0
    assert out.splitlines()[-1] == f"plan: {page}"
    assert str(trace) in page.read_text(encoding="utf-8")
    assert (tmp_path / "plan" / "threshold.png").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    ("name", "speedup", "dropped_share", "threshold_s", "iteration_ratio"),
    [
        ("bytedance_se", 1.1948, 0.1091, 5.7248, 1.2612),
        ("pai_job_1", 1.0557, 0.0590, 5.2000, 1.0967),
        ("pai_job_2", 1.0921, 0.1360, 8.6230, 1.1244),
    ],
)
def test_real_traces_meet_the_bar(
    capsys: pytest.CaptureFixture[str],
    name: str,
    speedup: float,
    dropped_share: float,
    threshold_s: float,
    iteration_ratio: float,
) -> None:
    path = str(DATA / f"{name}.csv.gz")

    found = numbers(capsys, "plan", path, "--max-drop", "1")

    assert found["speedup"] == pytest.approx(speedup, abs=5e-4)
    assert found["dropped_share"] == pytest.approx(dropped_share, abs=5e-5)
    assert found["threshold_s"] == pytest.approx(threshold_s, abs=5e-5)
    assert found["iteration_ratio"] == pytest.approx(iteration_ratio, abs=5e-5)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    ("name", "stragglers"),
    [("bytedance_ar", ["0"]), ("pai_job_4", ["0", "5", "6", "7", "8"])],
)
def test_real_stragglers_are_listed_within_the_default_limit(
    capsys: pytest.CaptureFixture[str], name: str, stragglers: list[str]
) -> None:
    found = numbers(capsys, "plan", str(DATA / f"{name}.csv.gz"))

    assert found["persistent_stragglers"] == stragglers
    assert found["dropped_share"] <= 0.10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--workers", "many"), "--workers is a whole number or several"),
        (("--workers", "-3"), "--workers is a whole number or several"),
        (("--workers", "1"), "--workers is 2 or more, not 1"),
        (("--micro-batches", "4,,8"), "--micro-batches is a whole number or several"),
        (("--comm-time", "-1"), "a communication time is 0 or more seconds"),
        (("--max-drop", "2"), "max_drop is a share in [0, 1], not 2.0"),
        (("--skip", "24"), "cannot leave 24 of 24 steps out; one must remain"),
        (("--run", "x"), "holds no runs to choose from; leave --run out"),
        (("gone.csv",), "gone.csv does not exist; a trace is .csv"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    options: tuple[str, ...],
    reason: str,
) -> None:
    code, out, errors = told(capsys, "plan", str(trace), *options)

    assert (code, out) == (1, "")
    assert errors.startswith("tailbound: ")
    assert reason in errors
    assert errors.count("\n") == 1


# -- simulate --------------------------------------------------------------------------


def test_a_simulation_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "simulate", "--workers", "1,8", "--steps", "20")

    assert code == 0
    assert "delay noise, 450 ms and 12 micro-batches" in out
    rows = [line.split()[0] for line in out.splitlines() if line[:8].strip().isdigit()]
    assert rows == ["1", "8"]


def test_the_options_reach_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        *("--noise", "gamma", "--workers", "8,2", "--micro-batches", "6"),
        *("--base", "0.3", "--comm-time", "0.1", "--max-drop", "0.05"),
        *("--variance", "0.2", "--stragglers", "uniform"),
        *("--steps", "10", "--seed", "7"),
    )

    found = numbers(capsys, "simulate", *options)

    assert [point["workers"] for point in found.pop("points")] == [8, 2]
    assert found == {
        "noise": "gamma",
        "variance_s2": 0.2,
        "stragglers": "uniform",
        "num_micro_batches": 6,
        "base_s": 0.3,
        "comm_s": 0.1,
        "max_drop": 0.05,
        "seed": 7,
    }


@pytest.mark.slow
def test_a_simulation_s_folder_gets_the_scale_graph(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--workers", "1,8", "--steps", "20", "--out", str(tmp_path / "sim"))

    code, out, _ = told(capsys, "simulate", *options)

    assert code == 0
    assert out.splitlines()[-1] == f"scale graph: {tmp_path / 'sim/scale_graph.png'}"
    assert (tmp_path / "sim" / "simulation.json").is_file()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--noise", "x"), "--noise is one of lognormal, normal, bernoulli"),
        (("--workers", "0"), "--workers is one or more numbers, each 1 or more"),
        (("--workers", "a"), "--workers is a whole number or several, such as 16,64"),
        (("--base", "0"), "--base is above 0 seconds, not 0.0"),
    ],
)
def test_a_mistake_in_a_simulation_is_one_line(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    code, out, errors = told(capsys, "simulate", *options)

    assert (code, out) == (1, "")
    assert errors.startswith("tailbound: ")
    assert reason in errors
    assert errors.count("\n") == 1

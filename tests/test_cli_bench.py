"""``tailbound bench allreduce``: options, output, one line for mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from report import benches
from tailbound.cli import run
from tailbound.lab import bench
from tailbound.lab.bench import BenchOptions
from tailbound.report.bench_outcome import BenchSummary


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """What the benchmark was asked to run; it answers at once."""
    seen: list[BenchOptions] = []

    def run_bench(options: BenchOptions, tell: Any) -> BenchSummary:
        tell("round 1 of 20")
        seen.append(options)
        return benches.summary()

    monkeypatch.setattr(bench, "run_bench", run_bench)
    return seen


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = run(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, errors = told(capsys, "allreduce", "--help")

    assert (code, errors) == (0, "")
    assert out.startswith("Usage: tailbound bench allreduce [OPTIONS]")
    for option in ("--world", "--hosts", "--burst-ms", "--plan", "--p-high", "--json"):
        assert option in out


def test_options_reach_the_benchmark(
    capsys: pytest.CaptureFixture[str], asked: list[BenchOptions]
) -> None:
    line = (
        "allreduce --world 3 --mbytes 2.5 --rounds 30 --warmup 4 --against none "
        "--plan server --p-low 0.01 --p-high 0.2 --hosts --loss 0.01 --burst 0.7 "
        "--burst-ms 20 --seed 9 --timeout-s 5 --json"
    )

    code, _, _ = told(capsys, *line.split())

    assert code == 0
    assert asked == [
        BenchOptions(
            world=3,
            mbytes=2.5,
            rounds=30,
            warmup=4,
            against="none",
            plan="server",
            p_low=0.01,
            p_high=0.2,
            hosts=True,
            loss=0.01,
            burst=0.7,
            burst_ms=20.0,
            seed=9,
            timeout_s=5.0,
        )
    ]


def test_without_options_it_is_as_documented(
    capsys: pytest.CaptureFixture[str], asked: list[BenchOptions]
) -> None:
    told(capsys, "allreduce")

    assert asked == [BenchOptions()]


def test_json_is_the_whole_result_alone(
    capsys: pytest.CaptureFixture[str], asked: list[BenchOptions]
) -> None:
    code, out, _ = told(capsys, "allreduce", "--json")

    assert code == 0
    assert json.loads(out) == json.loads(benches.summary().to_json())


def test_people_get_a_table(
    capsys: pytest.CaptureFixture[str], asked: list[BenchOptions]
) -> None:
    code, out, _ = told(capsys, "allreduce")

    assert code == 0
    assert out.startswith("95 % of the rounds within 119 ms, Gloo's within 476 ms")
    assert "report:" not in out


@pytest.mark.slow
def test_out_gets_the_page(
    capsys: pytest.CaptureFixture[str], asked: list[BenchOptions], tmp_path: Path
) -> None:
    code, out, _ = told(capsys, "allreduce", "--out", str(tmp_path / "b"))

    assert code == 0
    assert out.endswith(f"report: {tmp_path / 'b' / 'bench.html'}\n")
    assert (tmp_path / "b" / "summary.json").exists()


def test_loss_on_loopback_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert told(capsys, "allreduce", "--loss", "0.01") == (
        1,
        "",
        "tailbound: --loss and --burst go with --hosts: the loopback interface loses "
        "nothing\n",
    )

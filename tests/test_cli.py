"""The commands: options, exit codes, one line for what goes wrong, JSON alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from report.synthetic import make_records, make_settings, one_check, one_epoch
from tailbound.cli import main, run
from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, MissingExtraError
from tailbound.lab import demo
from tailbound.lab.crew import Progress
from tailbound.lab.demo import DemoOptions
from tailbound.protocol.messages import BucketSpec
from tailbound.records import write_lines
from tailbound.report import build
from tailbound.report.outcome import Summary
from tailbound.report.summary import summarise
from tailbound.transport.group import Group

SETTINGS = make_settings(epochs=1, burst_rounds=[8])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder, as the demo leaves it."""
    (tmp_path / "settings.json").write_bytes(msgspec.json.encode(SETTINGS))
    write_lines(tmp_path / "rounds.jsonl", make_records(SETTINGS))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = run([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tailbound", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **{"stdout": subprocess.PIPE, **settings},
    )


# -- options and exit codes -----------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "serve", "report", "doctor"])
def test_every_command_explains_itself(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, errors = told(capsys, command, "--help")

    assert (code, errors) == (0, "")
    assert out.startswith(f"Usage: tailbound {command} [OPTIONS]")
    assert "--json" in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "--version") == (0, "tailbound 0.1.0\n", "")


def test_no_command_is_answered_with_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, errors = told(capsys)

    assert (code, out) == (2, "")
    assert "doctor" in errors


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train"], "No such command 'train'; see `tailbound --help`"),
        (["serve"], "Missing option '--workers'; see `tailbound serve --help`"),
        (["report"], "Missing argument "),
        (["doctor", "--prot", "1"], "No such option: --prot"),
        (["demo", "--workers", "many"], "Invalid value for '--workers': "),
        (["demo", "extra"], "Got unexpected extra argument"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, errors = told(capsys, *arguments)

    assert (code, out) == (2, "")
    assert errors.startswith(f"tailbound: {line}")
    assert errors.endswith(" --help`\n")
    assert errors.count("\n") == 1


def raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``tailbound report`` end with this error."""

    def fail(directory: Path) -> Path:
        raise error

    monkeypatch.setattr(build, "build_report", fail)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left", "out"), 1, "[Errno 28] No space left: 'out'"),
        (ConfigError("one\n  two"), 1, "one two"),
        (MissingExtraError("no plots"), 1, "no plots"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
    ],
)
def test_what_goes_wrong_is_one_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    raises(error, monkeypatch)

    assert told(capsys, "report", "x", "--json") == (code, "", f"tailbound: {line}\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raises(ValueError("not one of ours"), monkeypatch)

    with pytest.raises(ValueError, match="not one of ours"):
        run(["report", "x"])


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Give the signal its meaning back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_command_exits_with_the_code(
    monkeypatch: pytest.MonkeyPatch, sigterm: None
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailbound", "nonsense"])

    with pytest.raises(SystemExit) as caught:
        main()

    assert caught.value.code == 2


def test_a_request_to_end_cleans_up_like_ctrl_c(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sigterm: None,
) -> None:
    def be_ended(directory: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10.0)  # the signal's handler runs at once

    monkeypatch.setattr(build, "build_report", be_ended)
    monkeypatch.setattr(sys, "argv", ["tailbound", "report", "x"])

    with pytest.raises(SystemExit) as caught:
        main()

    assert caught.value.code == 143
    assert capsys.readouterr().err == "tailbound: terminated\n"


@pytest.mark.slow
@pytest.mark.processes
def test_a_reader_that_has_gone_is_no_error_to_talk_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)

    process = start("--version", stdout=writing)
    os.close(writing)
    _, errors = process.communicate(timeout=30.0)

    assert (process.returncode, errors) == (1, "")


# -- report ---------------------------------------------------------------------------


@pytest.mark.slow
def test_report_rebuilds_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, errors = told(capsys, "report", str(folder), "--json")

    assert (code, errors) == (0, "")
    assert json.loads(out)["fixed"]["steps"] == 25
    assert json.loads((folder / "summary.json").read_text()) == json.loads(out)


@pytest.mark.slow
def test_report_prints_a_table_and_where_the_page_is(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    picture = folder / "overview.png"

    code, out, errors = told(capsys, "report", str(folder), "--png", str(picture))

    assert (code, errors) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "phase-aware" in out
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"


# -- doctor ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sockets
def test_doctor_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, errors = told(capsys, "doctor", "--json")

    answer = json.loads(out)
    assert errors == ""
    assert code == (1 if answer["status"] == "broken" else 0)
    assert [check["name"] for check in answer["checks"]][-1] == "loopback"


@pytest.mark.slow
@pytest.mark.sockets
def test_doctor_says_what_is_broken_towards_a_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    code, out, errors = told(capsys, "doctor", "127.0.0.1", "--port", str(port))

    assert (code, errors) == (1, "")
    assert "broken" in out
    assert "run: tailbound doctor --listen --port" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "0"], "port is 1 to 65535, not 0"),
        (["--timeout-s", "0"], "timeout is a positive number of seconds, not 0.0"),
        (["--listen", "--json"], "--json goes with the checks, not with --listen"),
        (["10.255.0.1", "--listen"], "10.255.0.1 is not an address of this machine"),
    ],
)
def test_doctor_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, errors = told(capsys, "doctor", *arguments)

    assert (code, out) == (1, "")
    assert errors.startswith(f"tailbound: {line}")
    assert errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
def test_doctor_listens_until_ctrl_c() -> None:
    process = start("doctor", "127.0.0.1", "--listen", "--port", "0")
    assert process.stdout is not None
    first = process.stdout.readline()

    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=10.0)

    assert first.startswith("listening at 127.0.0.1:")
    assert "served 0 clients" in out
    assert (process.returncode, errors) == (0, "")


# -- serve ----------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def join_and_leave(address: str) -> None:
    """Be the only worker of a job for a moment."""
    Group(
        address,
        rank=0,
        world_size=1,
        buckets=(BucketSpec("float32", ("w",), ((8,),)),),
        bound=LossBound(),
        transport=Transport(mtu=1500, timeout_s=10.0),
    ).close()


def serve_one_job(address: str, *arguments: str) -> int:
    codes: list[int] = []
    serving = threading.Thread(
        target=lambda: codes.append(
            run(["serve", "--workers", "1", "--bind", address, *arguments])
        )
    )
    serving.start()
    join_and_leave(address)
    serving.join(10.0)
    return codes[0]


@pytest.mark.sockets
def test_serve_tells_its_address_and_what_it_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = f"127.0.0.1:{free_port()}"

    code = serve_one_job(address)

    first, last = capsys.readouterr().out.splitlines()
    assert code == 0
    assert first == f"serving 1 workers at {address}"
    assert last == "done: 0 datagrams accepted, 0 stale, 0 foreign, 0 malformed"


@pytest.mark.sockets
def test_serve_prints_one_json_object_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = f"127.0.0.1:{free_port()}"

    options = ("--mtu", "1500", "--port-range", "20000-20999", "--json")
    code = serve_one_job(address, *options)

    captured = capsys.readouterr()
    assert code == 0
    assert json.loads(captured.out)["address"] == address
    assert json.loads(captured.out)["datagrams"]["foreign"] == 0
    assert captured.err == f"serving 1 workers at {address}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workers", "0"], "a job has 1 or more workers, not 0"),
        (["--workers", "1", "--mtu", "0"], "mtu is 'auto' or 576 to 65535 bytes"),
        (["--workers", "1", "--timeout-s", "0"], "timeout_s is a positive number"),
        (["--workers", "1", "--bind", "10.255.0.1"], "10.255.0.1 is not an address"),
        (["--workers", "1", "--bind", "fd99::1"], "fd99::1 is not an address"),
        (["--workers", "1", "--bind", "[fd99::1]"], "fd99::1 is not an address"),
        (["--workers", "1", "--bind", "[fd99::1]:5"], "fd99::1 is not an address"),
        (["--workers", "1", "--bind", "host:99999"], "an address is host:port or"),
        (["--workers", "1", "--port-range", "9000"], "--port-range is FIRST-LAST"),
        (["--workers", "1", "--port-range", "5-70000"], "port_range is (first, last)"),
        (["--workers", "1", "--security", "top"], "security is one of ('session', "),
        (["--workers", "1", "--security", "encrypted"], "security='encrypted' needs a"),
    ],
)
def test_serve_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, errors = told(capsys, "serve", *arguments)

    assert (code, out) == (1, "")
    assert errors.startswith(f"tailbound: {line}")
    assert errors.count("\n") == 1


# -- demo -----------------------------------------------------------------------------


@pytest.fixture
def quick_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """Replace the demo by its progress and a finished run; what it was asked for."""
    asked: list[DemoOptions] = []
    summary = summarise(make_records(SETTINGS), SETTINGS)

    def run_demo(options: DemoOptions, progress: Progress) -> tuple[Summary, Path]:
        asked.append(options)
        for name in ("fixed", "adaptive"):
            progress.begin(name, 2)
            for step in (1, 2):
                progress.step(name, one_check(name, step, p=0.408))
            progress.epoch(name, one_epoch(name, 1))
        return summary, folder

    monkeypatch.setattr(demo, "run_demo", run_demo)
    return asked


def test_demo_prints_one_json_object_and_its_progress_elsewhere(
    capsys: pytest.CaptureFixture[str], quick_demo: list[DemoOptions]
) -> None:
    code, out, errors = told(capsys, "demo", "--json", "--quick", "--task", "text")

    assert code == 0
    answer = json.loads(out)
    for name in ("fixed", "adaptive"):
        assert answer[name].keys() >= {
            "burst_ms",
            "p99_ms",
            "mean_ms",
            "train_s",
            "metric",
            "retransmitted_share",
            "lost_share",
            "probes_per_round",
        }
    assert answer["ratio"].keys() >= {"burst", "p99", "mean", "train"}
    assert "fixed: epoch 1, step 25, accuracy 0.9000" in errors
    assert "p 40.8% (not critical)" in errors
    assert quick_demo == [DemoOptions(quick=True, task="text")]


def test_demo_prints_a_table_and_where_the_page_is(
    capsys: pytest.CaptureFixture[str], quick_demo: list[DemoOptions], folder: Path
) -> None:
    code, out, _ = told(
        capsys, "demo", "--workers", "2", "--rtt-ms", "0", "--loss", "0"
    )

    assert code == 0
    assert "phase-aware" in out
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert quick_demo == [DemoOptions(workers=2, rtt_ms=0.0, loss=0.0)]


def test_the_options_defaults_are_the_demos_own(
    capsys: pytest.CaptureFixture[str], quick_demo: list[DemoOptions]
) -> None:
    told(capsys, "demo")

    assert quick_demo == [DemoOptions()]

"""What a user can get wrong, and what the world can: one line, a code, no process left.

The demo's own mistakes (options, data, folder, a killed process) are in ``test_demo``.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tailbound
from lab.launched import children_of, is_running
from tailbound.cli import run
from tailbound.config import LossBound, Transport
from tailbound.errors import HandshakeError, TailboundError, UnreachableError
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.lab import datasets
from tailbound.protocol.messages import BucketSpec, Hello
from tailbound.protocol.wire import VERSION, encode_control
from tailbound.records import read_lines
from tailbound.training.attaching import MakeExchange, attach_through
from tailbound.transport.group import Server
from training.ranks import Vector, meet_at, plain_sgd, run_ranks

pytestmark = pytest.mark.sockets


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that ends with exit code 1."""
    assert run([*arguments]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("tailbound: ")
    return line


# -- before anything runs -------------------------------------------------------------


def test_a_port_in_use_is_named_with_who_can_tell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(
            capsys, "serve", "--workers", "2", "--bind", f"127.0.0.1:{port}"
        )

    assert line == (
        f"tailbound: TCP port {port} is in use on 127.0.0.1: stop the program there "
        "(`ss -ltnp` names it) or choose other ports"
    )


@pytest.mark.processes
def test_unreadable_data_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, out = tmp_path / "none.txt", tmp_path / "out"

    line = one_line(
        capsys, "demo", "--task", "text", "--data", str(data), "--out", str(out)
    )

    assert line == (
        f"tailbound: cannot read {data} (No such file or directory); expected a text "
        "file"
    )
    assert not out.exists()


@pytest.mark.parametrize("made", ["file", "run"])
def test_a_folder_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").write_text("")

    line = one_line(capsys, "demo", "--out", str(tmp_path / made))

    assert line.startswith(f"tailbound: {tmp_path / made} ")
    assert line.endswith("with --out")


def test_a_folder_without_a_run_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = one_line(capsys, "report", str(tmp_path))

    assert str(tmp_path / "settings.json") in line


@pytest.mark.parametrize(
    ("module", "package"), [("matplotlib", "matplotlib"), ("mnist1d", "mnist1d")]
)
def test_a_missing_extra_is_told_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.data", None)
    datasets.generate_mnist1d.cache_clear()

    line = one_line(capsys, "demo", "--task", "mnist1d", "--out", str(tmp_path / "out"))

    assert f'needs {package}; run: pip install "tailbound[demo]"' in line
    assert not (tmp_path / "out").exists()


# -- meeting --------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_a_refused_connection_names_the_server_and_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    port = closed_port()
    model = Vector()

    with pytest.raises(UnreachableError) as caught:
        tailbound.attach(
            model,
            plain_sgd(model),
            transport=Transport(
                plan="server", server=f"127.0.0.1:{port}", timeout_s=0.3
            ),
        )

    assert str(caught.value) == (
        f"TCP to the server at 127.0.0.1:{port} does not get through; Connection "
        "refused; is the server running?"
    )


def test_another_protocol_version_is_named_on_both_sides() -> None:
    server = Server(2, transport=Transport(timeout_s=10.0))
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            server.run()
        except TailboundError as error:
            errors.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    host, port = server.address.split(":")
    hello = Hello(
        VERSION + 1,
        0,
        2,
        sys.byteorder,
        (BucketSpec("float32", ("w",), ((1,),)),),
        LossBound(),
        1500,
        9,
        1 << 20,
    )
    with socket.create_connection((host, int(port))) as newer:
        newer.sendall(encode_control(hello))
        answer = newer.recv(65536)
    serving.join(10.0)

    assert b"install the same tailbound version everywhere" in answer
    (error,) = errors
    assert isinstance(error, HandshakeError)
    assert str(error) == (
        f"protocol version differs: {VERSION} (the server) here, {VERSION + 1} (a "
        "worker) there; install the same tailbound version everywhere"
    )


def test_models_that_differ_are_named_on_every_rank() -> None:
    def work(rank: int, make_exchange: MakeExchange) -> None:
        model = Vector(rank + 2)
        attach_through(make_exchange, model, plain_sgd(model))

    outcomes = run_ranks(work)

    for outcome in outcomes:
        assert isinstance(outcome, TailboundError)
        assert "w [2] (rank 0)" in str(outcome)
        assert "w [3] (rank 1)" in str(outcome)
        assert str(outcome).endswith("build the same model on every rank")


@pytest.mark.slow
def test_udp_that_is_blocked_while_tcp_works_is_named_with_the_port() -> None:
    """The server's side loses every datagram and no control message."""
    deaf = Transport(
        mtu=1500,
        timeout_s=1.0,
        impairments=Impairments(losses=(IndependentLoss(rate=1.0),)),
    )
    server = Server(1, transport=deaf)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            server.run()
        except TailboundError as error:
            errors.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    make_exchange = meet_at(server, 0, 1, transport=Transport(mtu=1500, timeout_s=1.0))
    with pytest.raises(TailboundError) as caught:
        make_exchange((BucketSpec("float32", ("w",), ((8,),)),))
    serving.join(10.0)

    assert len(errors) == 1
    for error, peer in ((errors[0], "rank 0"), (caught.value, "")):
        assert "UDP" in str(error)
        assert f"{peer} at 127.0.0.1 port " in str(error)
        assert "TCP works, but no datagram came from" in str(error)
        assert "open UDP for this port in the firewall" in str(error)
        assert len(str(error).splitlines()) == 1


# -- ending a run from outside --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_serve_ends_at_a_signal_with_one_line(
    number: signal.Signals, code: int, word: str
) -> None:
    command = [sys.executable, "-m", "tailbound", "serve", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving 2 workers at 127.0.0.1:")

    process.send_signal(number)
    _, errors = process.communicate(timeout=10.0)

    assert (process.returncode, errors) == (code, f"tailbound: {word}\n")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "is_ctrl_c", "code", "word"),
    [
        (signal.SIGINT, True, 130, "tailbound: interrupted"),
        (signal.SIGTERM, False, 143, "tailbound: terminated"),
        (signal.SIGKILL, False, -9, ""),
    ],
)
def test_a_signal_ends_every_process_of_the_demo_and_keeps_its_records(
    tmp_path: Path, number: signal.Signals, is_ctrl_c: bool, code: int, word: str
) -> None:
    """Ctrl-C reaches all processes of a terminal, the others only the launcher."""
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_bytes(bytes(range(32, 127)) * 5000)
    options = ["--task", "text", "--data", str(text), "--workers", "2"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tailbound", "demo", *options, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    records = out / "rounds.jsonl"
    deadline_s = time.monotonic() + 50.0
    while not (records.exists() and records.stat().st_size > 2000):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    processes = children_of(launcher.pid)
    signalled_s = time.monotonic()

    if is_ctrl_c:
        os.killpg(launcher.pid, number)
    else:
        launcher.send_signal(number)
    out_text, errors = launcher.communicate(timeout=10.0)
    while any(is_running(pid) for pid in processes):
        assert time.monotonic() - signalled_s < 10.0, children_of(1)
        time.sleep(0.05)

    assert sorted(processes.values()) == ["rank 0", "rank 1", "server"]
    assert time.monotonic() - signalled_s < 10.0
    assert launcher.returncode == code
    assert out_text == ""
    assert "Traceback" not in errors
    assert word in errors.splitlines()[-1:] or not word
    assert {one.step for one in read_lines(records)} >= {1}

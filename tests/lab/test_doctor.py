"""What the doctor finds, and what it says to do."""

import errno
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound.lab import doctor
from tailbound.lab.doctor import (
    Check,
    diagnose,
    exit_code,
    judge_loopback,
    judge_loss,
    judge_queue,
    judge_round_trip,
    listen,
    render,
    to_json,
)
from tailbound.transport import addresses
from tailbound.transport.batching import Batching

OK = Check("a", "ok", "fine")
SLOW = Check("b", "slow", "works", "do this")
BROKEN = Check("c", "broken", "fails", "do that")


@contextmanager
def listening() -> Iterator[tuple[int, list[str]]]:
    """A doctor at the far end; gives its port and what it says."""
    said: list[str] = []
    started, stop = threading.Event(), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        started.set()

    def run() -> None:
        listen("127.0.0.1", 0, say=say, should_stop=stop.is_set)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(5.0)
    port = int(said[0].split()[2].rpartition(":")[2])
    try:
        yield port, said
    finally:
        stop.set()
        thread.join(10.0)


@contextmanager
def half_a_doctor(received: int | None, *, echo_up_to: int = 0) -> Iterator[int]:
    """A far end whose UDP is blocked, or comes back only up to some size.

    Args:
        received: datagrams it says it got; None hangs up when asked.
        echo_up_to: bytes of the largest datagram that it sends back.
    """
    listener = addresses.listen("127.0.0.1")
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    udp.settimeout(0.02)
    listener.settimeout(5.0)
    stop = threading.Event()

    def control() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(b"ok %d\n" % udp.getsockname()[1])
            while data := connection.recv(100):
                if data.endswith(b"count\n"):
                    if received is None:
                        return
                    connection.sendall(b"%d\n" % received)

    def echo() -> None:
        while not stop.is_set():
            try:
                datagram, source = udp.recvfrom(65535)
            except TimeoutError:
                continue
            if len(datagram) <= echo_up_to:
                udp.sendto(datagram, source)

    threads = [threading.Thread(target=control), threading.Thread(target=echo)]
    for thread in threads:
        thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        for thread in threads:
            thread.join(10.0)
        listener.close()
        udp.close()


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.sockets
@pytest.mark.slow
def test_this_machine_alone_is_five_checks() -> None:
    checks = diagnose(None, 29499, 1.0)

    assert [check.name for check in checks] == [
        "batched send",
        "batched receive",
        "receive queue",
        "send queue",
        "loopback",
    ]
    assert exit_code(checks) == 0
    assert "GB/s" in checks[4].detail


@pytest.mark.sockets
@pytest.mark.slow
def test_a_good_path_is_checked_to_the_end() -> None:
    with listening() as (port, said):
        checks = diagnose("127.0.0.1", port, 5.0)

    found = by_name(checks[5:])
    assert list(found) == ["route", "TCP", "UDP", "round trip", "packet size", "loss"]
    assert {check.status for check in checks[5:]} == {"ok"}
    assert found["route"].detail.startswith("from 127.0.0.1, MTU 6553")
    assert found["UDP"].detail == f"UDP to 127.0.0.1 port {port} comes back"
    assert found["packet size"].detail == "9000 bytes, unfragmented"
    assert found["loss"].detail == (
        "0 of 200 full-sized datagrams lost (0.0%): "
        "0 on the way there, 0 on the way back"
    )
    # One small datagram, 20 for the round trip, one large one and 200 for the loss.
    assert said[1] == "served 1 clients, sent back 222 datagrams"


@pytest.mark.sockets
@pytest.mark.slow
def test_nothing_listening_says_what_to_run_there() -> None:
    with addresses.listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]

    checks = diagnose("127.0.0.1", port, 5.0)

    assert checks[-1] == Check(
        "TCP",
        "broken",
        f"no tailbound doctor at 127.0.0.1 port {port} over TCP: "
        "the connection is refused",
        f"on 127.0.0.1 run: tailbound doctor --listen --port {port}",
    )
    assert exit_code(checks) == 1


@pytest.mark.sockets
@pytest.mark.slow
def test_a_host_that_does_not_resolve_is_broken() -> None:
    last = diagnose("no-such-host.invalid", 29499, 1.0)[-1]

    assert (last.name, last.status) == ("route", "broken")
    assert last.detail.startswith("'no-such-host.invalid' does not resolve")


@pytest.mark.sockets
@pytest.mark.slow
def test_S16_udp_that_does_not_arrive_is_blocked_on_the_way_there() -> None:
    with half_a_doctor(received=0) as port:
        last = diagnose("127.0.0.1", port, 0.1)[-1]

    assert (last.name, last.status) == ("UDP", "broken")
    udp_port = last.remedy.split()[-3]
    assert last.detail == (
        f"TCP works, but UDP to 127.0.0.1 port {udp_port} is blocked: open UDP port "
        f"{udp_port} in the firewalls there and on the way"
    )
    assert last.remedy == (
        f"on that host: iptables -I INPUT -p udp --dport {udp_port} -j ACCEPT"
    )


@pytest.mark.sockets
@pytest.mark.slow
def test_S16_udp_that_arrives_and_is_not_answered_is_blocked_here() -> None:
    with half_a_doctor(received=5) as port:
        last = diagnose("127.0.0.1", port, 0.1)[-1]

    assert (last.name, last.status) == ("UDP", "broken")
    assert "its answers are blocked: open UDP from port" in last.detail
    assert last.remedy.startswith("iptables -I INPUT -p udp --sport ")


@pytest.mark.sockets
@pytest.mark.slow
def test_a_path_narrower_than_the_interface_names_the_mtu_to_set() -> None:
    with half_a_doctor(received=0, echo_up_to=1472) as port:
        found = by_name(diagnose("127.0.0.1", port, 0.2))

    assert found["packet size"] == Check(
        "packet size",
        "broken",
        "packets of 9000 bytes, the MTU here, do not come back; 1500 do",
        "tailbound.Transport(mtu=1500) on all ranks",
    )
    assert found["loss"].detail.startswith("0 of 200 full-sized datagrams lost")


@pytest.mark.sockets
@pytest.mark.slow
def test_a_path_for_small_packets_only_is_broken() -> None:
    with half_a_doctor(received=0, echo_up_to=1000) as port:
        last = diagnose("127.0.0.1", port, 0.1)[-1]

    assert (last.name, last.status) == ("packet size", "broken")
    assert last.detail == (
        "small packets come back, those of 1280 bytes and more do not"
    )


@pytest.mark.sockets
@pytest.mark.slow
def test_a_kernel_without_batches_is_slow_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = Batching(gso=False, gro=False, reason="UDP_SEGMENT: Invalid argument")
    monkeypatch.setattr(doctor, "probe_batching", lambda: none)

    checks = diagnose(None, 29499, 1.0)

    found = by_name(checks)
    assert found["batched send"].status == found["batched receive"].status == "slow"
    assert found["batched send"].detail == (
        "one datagram a call (UDP_SEGMENT: Invalid argument)"
    )
    assert found["loopback"].status == "slow"
    assert exit_code(checks) == 0


@pytest.mark.sockets
@pytest.mark.slow
def test_S16_a_firewall_of_this_machine_is_named_by_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with half_a_doctor(received=0) as port:
        monkeypatch.setattr(socket.socket, "sendmsg", refuse)
        checks = diagnose("127.0.0.1", port, 0.1)

    last = checks[-1]
    assert by_name(checks)["loopback"].status == "broken"
    assert (last.name, last.status) == ("UDP", "broken")
    assert "this machine refuses to send UDP to 127.0.0.1 port" in last.detail
    assert last.detail.endswith("(EPERM)")
    assert last.remedy.startswith("iptables -I OUTPUT -p udp --dport ")


@pytest.mark.sockets
@pytest.mark.slow
def test_S12_a_path_that_refuses_batches_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnose(None, 29499, 1.0)  # the self-test of the kernel comes first, and passes
    real = socket.socket.sendmsg

    def refuse(sock: socket.socket, data: Any, ancillary: Any, *rest: Any) -> int:
        if ancillary:
            raise OSError(errno.EIO, "Input/output error")
        return real(sock, data, ancillary, *rest)

    with listening() as (port, _):
        monkeypatch.setattr(socket.socket, "sendmsg", refuse)
        found = by_name(diagnose("127.0.0.1", port, 5.0))

    assert found["batches on this path"].status == "slow"
    assert found["batches on this path"].remedy == (
        "ethtool -K DEVICE tx-checksumming on"
    )
    assert found["loss"].status == "ok"


@pytest.mark.sockets
@pytest.mark.slow
def test_a_listener_that_ends_in_the_middle_is_broken() -> None:
    with half_a_doctor(received=None) as port:
        last = diagnose("127.0.0.1", port, 0.1)[-1]

    assert (last.name, last.status) == ("TCP", "broken")
    assert last.remedy.startswith("something else has that port, or the listener ended")


@pytest.mark.parametrize(
    ("port", "timeout_s", "words"),
    [
        (0, 1.0, "port is 1 to 65535, not 0"),
        (65536, 1.0, "port is 1 to 65535, not 65536"),
        (1, 0.0, "timeout is a positive number of seconds, not 0.0"),
        (1, float("nan"), "timeout is a positive number of seconds, not nan"),
    ],
)
def test_a_wrong_setting_is_refused(port: int, timeout_s: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        diagnose("127.0.0.1", port, timeout_s)


@pytest.mark.sockets
def test_the_listener_ends_on_ctrl_c_and_says_what_it_did() -> None:
    said: list[str] = []

    def interrupt() -> bool:
        raise KeyboardInterrupt

    listen("127.0.0.1", 0, say=said.append, should_stop=interrupt)

    assert said[0].startswith("listening at 127.0.0.1:")
    assert said[1] == "served 0 clients, sent back 0 datagrams"


@pytest.mark.sockets
def test_the_listener_prints_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    listen("127.0.0.1", 0, should_stop=lambda: True)

    assert capsys.readouterr().out.startswith("listening at 127.0.0.1:")


def test_a_queue_is_judged_by_half_its_grant() -> None:
    enough = judge_queue("receive queue", "rmem", 16777216)
    short = judge_queue("receive queue", "rmem", 425984)

    assert enough == Check("receive queue", "ok", "8388608 bytes of 8388608 wanted")
    assert short == Check(
        "receive queue",
        "slow",
        "212992 bytes of 8388608 wanted",
        "sysctl -w net.core.rmem_max=8388608",
    )


@pytest.mark.parametrize(
    ("came", "arrived", "status"),
    [(200, 200, "ok"), (198, 199, "ok"), (197, 200, "slow"), (0, 60, "broken")],
)
def test_loss_is_judged_just_inside_and_just_outside(
    came: int, arrived: int, status: str
) -> None:
    assert judge_loss(came, arrived).status == status


def test_a_round_trip_is_judged_just_inside_and_just_outside() -> None:
    assert judge_round_trip(0.020) == Check(
        "round trip", "ok", "20.000 ms, median of 20"
    )
    assert judge_round_trip(0.0201).status == "slow"


def test_batches_slower_than_single_datagrams_are_slow() -> None:
    assert judge_loopback(1e9, 2.5e9) == Check(
        "loopback",
        "ok",
        "2.50 GB/s batched, 1.00 GB/s plain (2.5 times), one process at both ends",
    )
    assert judge_loopback(1e9, 0.9e9).status == "slow"
    assert judge_loopback(1e9, None).detail == "1.00 GB/s, not batched"


def test_loss_says_on_which_way() -> None:
    assert judge_loss(came=190, arrived=196).detail == (
        "10 of 200 full-sized datagrams lost (5.0%): "
        "4 on the way there, 6 on the way back"
    )


@pytest.mark.parametrize(
    ("checks", "status", "code"),
    [
        ([], "ok", 0),
        ([OK], "ok", 0),
        ([OK, SLOW], "slow", 0),
        ([SLOW, BROKEN, OK], "broken", 1),
    ],
)
def test_the_worst_check_decides(checks: list[Check], status: str, code: int) -> None:
    assert json.loads(to_json(checks))["status"] == status
    assert exit_code(checks) == code


def test_json_has_every_field() -> None:
    assert json.loads(to_json([SLOW])) == {
        "status": "slow",
        "checks": [
            {"name": "b", "status": "slow", "detail": "works", "remedy": "do this"}
        ],
    }


def test_the_table_shows_what_to_do() -> None:
    console = Console(width=60, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(render([OK, Check("d", "broken", "[red]as is", "do that")]))

    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[2] == ["a", "│", "ok", "│", "fine"]
    assert lines[3] == ["d", "│", "broken", "│", "[red]as", "is"]
    assert lines[4][-3:] == ["->", "do", "that"]


def test_the_doctor_needs_no_torch() -> None:
    program = (
        "import sys, tailbound.lab.doctor; "
        "raise SystemExit('torch' in sys.modules and 'torch was loaded')"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")

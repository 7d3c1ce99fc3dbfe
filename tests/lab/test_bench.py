"""The benchmark: its options, its rounds with actors for ranks, and for real."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from namespaces import needs_namespaces
from tailbound.errors import ConfigError, TailboundError
from tailbound.lab.bench import BenchOptions, run_bench
from tailbound.report.bench_outcome import BenchRatio, Checked

ACTOR = str(Path(__file__).with_name("bench_actor.py"))
SPACES = Path("/run/netns")
BUSY = 5
"""Threads of a rank that is in both jobs."""


def played(part: str, **options: Any) -> BenchOptions:
    """Options with actors for ranks."""
    settings = {"world": 2, "rounds": 3, "warmup": 1, "timeout_s": 5.0, **options}
    return BenchOptions(command=(sys.executable, ACTOR, part), **settings)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"world": 1}, "--world is 2 to 64 ranks, not 1"),
        ({"world": 65}, "--world is 2 to 64 ranks, not 65"),
        ({"mbytes": 0.0}, "--mbytes is above 0 and at most 4000, not 0.0"),
        ({"rounds": 0}, "--rounds is 1 or more, not 0"),
        ({"warmup": -1}, "--warmup is 0 or more, not -1"),
        ({"seed": -1}, "--seed is 0 or more, not -1"),
        ({"against": "nccl"}, "--against is gloo or none, not 'nccl'"),
        ({"plan": "ring"}, "--plan is sharded or server, not 'ring'"),
        ({"hosts": True, "loss": 1.0}, r"--loss is a share in \[0, 1\), not 1.0"),
        ({"hosts": True, "burst": -0.1}, r"--burst is a share in \[0, 1\), not -0.1"),
        ({"loss": 0.01}, "--loss and --burst go with --hosts: the loopback interface"),
        ({"burst": 0.7}, "--loss and --burst go with --hosts: the loopback interface"),
        (
            {"hosts": True, "burst": 0.7, "rounds": 9},
            "--burst strikes every 10th round: --rounds is 10 or more with it, not 9",
        ),
        ({"burst_ms": 0.0}, "--burst-ms is above 0 and at most 10000, not 0.0"),
        ({"p": 0.1, "p_low": 0.1}, "--p is a fixed bound: give either that or"),
        ({"p": 0.1, "p_high": 0.1}, "--p is a fixed bound: give either that or"),
        ({"p_low": 0.5}, r"p_high is a share in \[p_low=0.5, 1\), not 0.408"),
        ({"p": 1.0}, r"p_low is a share in \[0, 1\), not 1.0"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        BenchOptions(**options)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, (0.008, 0.408)),
        ({"p": 0.0}, (0.0, 0.0)),
        ({"p_low": 0.1}, (0.1, 0.408)),
        ({"p_low": 0.0, "p_high": 0.2}, (0.0, 0.2)),
    ],
)
def test_the_bound_is_the_library_s_unless_told(
    options: dict[str, Any], bound: tuple[float, float]
) -> None:
    made = BenchOptions(**options).bound()

    assert (made.p_low, made.p_high) == bound


def test_a_burst_strikes_every_tenth_round_that_counts() -> None:
    options = BenchOptions(hosts=True, burst=0.7, rounds=30, warmup=20)

    assert [n for n in range(-19, 31) if options.is_burst(n)] == [10, 20, 30]


@pytest.mark.slow
@pytest.mark.processes
class TestWithActors:
    def test_a_round_is_as_long_as_its_slowest_rank(self) -> None:
        told: list[str] = []

        summary = run_bench(played("good"), told.append)

        assert told == [
            "starting ranks",
            "warming up",
            "round 1 of 3",
            "round 2 of 3",
            "round 3 of 3",
        ]
        assert [one.tailbound.latency_ms for one in summary.rounds] == [15.0] * 3
        assert summary.gloo is not None
        assert (summary.gloo.p50_ms, summary.gloo.max_ms) == (30.0, 30.0)
        assert (summary.tailbound.cpu_ms, summary.gloo.cpu_ms) == (10.0, 6.0)
        # The loopback interface counts for all ranks together.
        assert (summary.tailbound.wire_mb, summary.gloo.wire_mb) == (1.5, 1.5)
        assert summary.ratio == BenchRatio(
            p50=0.5, p95=0.5, p99=0.5, max=0.5, cpu=1.66667, wire=1.0
        )
        assert summary.checked == Checked(exact=8, identical=0)
        assert (summary.settings.mtu, summary.settings.p_high) == (65536, 0.408)

    def test_chunks_that_are_missing_everywhere_alike_are_counted(self) -> None:
        summary = run_bench(played("lossy", warmup=0))

        assert summary.checked == Checked(exact=3, identical=3)
        assert [(b.p, b.rounds, b.missing_share) for b in summary.bounds] == [
            (0.408, 3, 0.2)
        ]

    def test_alone_it_is_compared_with_nothing(self) -> None:
        summary = run_bench(played("good", against="none"))

        assert (summary.gloo, summary.ratio) == (None, None)
        assert {one.gloo for one in summary.rounds} == {None}
        assert summary.checked == Checked(exact=4, identical=0)

    @pytest.mark.parametrize(
        ("part", "told"),
        [
            ("wrong", "gloo's result of round 0 is wrong on rank 1"),
            ("apart", "tailbound's result of round 0 is not the same on all ranks"),
        ],
    )
    def test_a_wrong_result_ends_it_and_names_the_rank(
        self, part: str, told: str
    ) -> None:
        with pytest.raises(TailboundError, match=told):
            run_bench(played(part))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.timeout(120)
class TestForReal:
    @pytest.mark.parametrize("plan", ["sharded", "server"])
    def test_both_libraries_come_to_the_known_result(self, plan: str) -> None:
        options = BenchOptions(
            world=3, mbytes=0.5, rounds=2, warmup=1, plan=plan, p=0.0, timeout_s=30.0
        )

        summary = run_bench(options)

        assert summary.checked == Checked(exact=6, identical=0)
        assert summary.gloo is not None
        for side in (summary.tailbound, summary.gloo):
            assert 0.0 < side.p50_ms <= side.p95_ms <= side.p99_ms <= side.max_ms
            assert side.cpu_ms == pytest.approx(side.user_ms + side.system_ms, rel=1e-4)
            # All but an own share goes out once, and its mean comes back; the server
            # plan sends whole gradients to and fro. Other traffic may come on top.
            assert side.wire_mb >= 2 * 2 * 0.5

    @needs_namespaces
    @pytest.mark.netns
    def test_real_loss_hits_both_and_replicas_stay_equal(self) -> None:
        options = BenchOptions(
            world=2,
            mbytes=1.0,
            rounds=10,
            warmup=0,
            hosts=True,
            loss=0.02,
            burst=0.7,
            burst_ms=20.0,
            p=0.1,
            timeout_s=30.0,
        )

        summary = run_bench(options)

        assert summary.settings.mtu == 1500
        assert [one.number for one in summary.rounds if one.is_burst] == [10]
        assert summary.tailbound.burst_ms == summary.rounds[9].tailbound.latency_ms
        checked = summary.checked
        assert checked.exact >= 10  # Gloo's, and tailbound's where nothing got lost
        assert checked.exact + checked.identical == 20
        (part,) = summary.bounds
        assert (part.p, part.rounds) == (0.1, 10)
        assert 0.0 < part.missing_share <= 0.1
        # Each rank sends half of 1 MB twice, in packets of 1448 bytes and headers.
        assert summary.tailbound.wire_mb >= 2.0 * 0.9 * 1500 / 1448

    @needs_namespaces
    @pytest.mark.netns
    @pytest.mark.parametrize(
        ("number", "code", "told", "threads"),
        [
            (signal.SIGINT, 130, "tailbound: interrupted\n", BUSY),
            (signal.SIGTERM, 143, "tailbound: terminated\n", 1),
            (signal.SIGTERM, 143, "tailbound: terminated\n", BUSY),
            (signal.SIGKILL, -9, "", 1),
            (signal.SIGKILL, -9, "", BUSY),
        ],
    )
    def test_no_namespace_and_no_rank_outlives_a_signal(
        self, number: signal.Signals, code: int, told: str, threads: int
    ) -> None:
        bench = start_endless()
        try:
            ranks, names = wait_for_two_ranks(bench.pid, threads)
            bench.send_signal(number)
            _, errors = bench.communicate(timeout=30.0)
        finally:
            bench.kill()
            bench.communicate()

        assert (bench.returncode, errors) == (code, told)
        assert len(names) == 3
        wait_until_gone(ranks, names)

    @needs_namespaces
    @pytest.mark.netns
    def test_a_killed_rank_is_named_and_ends_all(self) -> None:
        bench = start_endless()
        try:
            ranks, names = wait_for_two_ranks(bench.pid, BUSY)
            os.kill(max(ranks), signal.SIGKILL)
            _, errors = bench.communicate(timeout=60.0)
        finally:
            bench.kill()
            bench.communicate()

        assert bench.returncode == 1
        assert errors == (
            "tailbound: rank 1 was killed by signal 9 (SIGKILL); if nobody did that, "
            "memory ran out: see `dmesg`\n"
        )
        wait_until_gone(ranks, names)


def start_endless() -> subprocess.Popen[str]:
    """A benchmark on hosts that would take hours."""
    arguments = "bench allreduce --hosts --world 2 --mbytes 1 --rounds 100000"
    return subprocess.Popen(
        [sys.executable, "-m", "tailbound", *arguments.split()],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def wait_for_two_ranks(pid: int, threads: int) -> tuple[list[int], list[str]]:
    """Process ids of its ranks, and names of its namespaces.

    Args:
        pid: of the benchmark.
        threads: that both ranks must have.
    """
    deadline_s = time.monotonic() + 40.0
    while time.monotonic() < deadline_s:
        ranks, names = [], []
        for child, words in children_of(pid):
            if "tailbound.lab.bench_rank" in words and "ip" not in words:
                if len(list(Path(f"/proc/{child}/task").iterdir())) >= threads:
                    ranks.append(child)
            elif words[:2] == ["sh", "-c"]:
                names = words[4:]
        if len(ranks) == 2:
            return ranks, names
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def children_of(pid: int) -> list[tuple[int, list[str]]]:
    """Children of a process, and the words of their command lines."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                line = Path(f"/proc/{child}/cmdline").read_text()
                found.append((child, line.rstrip("\0").split("\0")))
    return found


def wait_until_gone(pids: list[int], names: list[str]) -> None:
    """Fail if a process or a namespace is still there after a while."""
    paths = [Path(f"/proc/{pid}") for pid in pids] + [SPACES / name for name in names]
    deadline_s = time.monotonic() + 20.0
    while any(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, [str(p) for p in paths if p.exists()]
        time.sleep(0.02)

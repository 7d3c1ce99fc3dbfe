"""Results of the benchmark, made up."""

from typing import Any

from tailbound.report.bench_outcome import (
    BenchRound,
    BenchSettings,
    BenchSummary,
    Checked,
    Turn,
    summarise_bench,
)


def settings(**changes: Any) -> BenchSettings:
    """Four ranks on hosts, 1 % of the packets lost, two bursts."""
    told: dict[str, Any] = {
        "world": 4,
        "mbytes": 20.0,
        "rounds": 20,
        "warmup": 3,
        "against": "gloo",
        "plan": "sharded",
        "p_low": 0.008,
        "p_high": 0.408,
        "hosts": True,
        "mtu": 1500,
        "loss": 0.01,
        "burst": 0.7,
        "burst_ms": 50.0,
        "burst_every": 10,
        "seed": 0,
        "cores": 2,
        "load": 0.25,
        "versions": {"torch": "2.13.0", "<b>": "1"},
        "started": "2026-01-02T03:04:05+00:00",
    }
    return BenchSettings(**{**told, **changes})


def turn(latency_ms: float, **changes: Any) -> Turn:
    """One all-reduce that cost 40 ms of CPU and 100 MB."""
    told: dict[str, Any] = {
        "latency_ms": latency_ms,
        "user_ms": 10.0,
        "system_ms": 30.0,
        "wire_mb": 100.0,
        "p": 0.0,
        "missing_share": 0.0,
    }
    return Turn(**{**told, **changes})


def rounds(num: int = 20, *, is_alone: bool = False) -> list[BenchRound]:
    """Rounds of 101, 102, ... ms and 60 ms of CPU; Gloo takes four times as long.

    The first half runs under 0.8 % and loses nothing, the second under 40.8 % and
    gives up a quarter. Every tenth is a burst.
    """
    return [
        BenchRound(
            number=number,
            is_burst=number % 10 == 0,
            tailbound=turn(
                100.0 + number,
                user_ms=30.0,
                wire_mb=80.0,
                p=0.008 if number <= num // 2 else 0.408,
                missing_share=0.0 if number <= num // 2 else 0.25,
            ),
            gloo=None if is_alone else turn(4.0 * (100.0 + number)),
        )
        for number in range(1, num + 1)
    ]


def summary(*, is_alone: bool = False, **changes: Any) -> BenchSummary:
    """All of it put together."""
    against = "none" if is_alone else "gloo"
    return summarise_bench(
        settings(against=against, **changes),
        rounds(is_alone=is_alone),
        Checked(exact=33, identical=13),
    )

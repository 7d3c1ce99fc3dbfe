"""The benchmark in words, on the terminal."""

# ruff: noqa: RUF001 (times and dashes as people read them)

import msgspec
from rich.console import Console

from report import benches
from tailbound.report.bench_outcome import BenchSummary, Checked, summarise_bench
from tailbound.report.bench_rows import bench_rows, bound_rows, headline, sentences
from tailbound.report.bench_table import make_bench_table


def shown(summary: BenchSummary) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(make_bench_table(summary))
    return capture.get()


def test_each_measure_has_both_libraries_and_their_ratio() -> None:
    rows = {row.label.strip(): row.cells for row in bench_rows(benches.summary())}

    assert rows == {
        "half of the rounds within": ("110 ms", "442 ms", "0.25×"),
        "95 % within": ("119 ms", "476 ms", "0.25×"),
        "99 % within": ("120 ms", "479 ms", "0.25×"),
        "slowest round": ("120 ms", "480 ms", "0.25×"),
        "mean": ("110 ms", "442 ms", "–"),
        "burst rounds, median": ("115 ms", "460 ms", "–"),
        "CPU of a rank": ("60.0 ms", "40.0 ms", "1.50×"),
        "in the program": ("30.0 ms", "10.0 ms", "–"),
        "in the kernel": ("30.0 ms", "30.0 ms", "–"),
        "sent by all ranks": ("80.0 MB", "100 MB", "0.80×"),
    }


def test_alone_the_other_columns_are_empty() -> None:
    cells = bench_rows(benches.summary(is_alone=True))[0].cells

    assert cells == ("110 ms", "–", "–")


def test_bounds_come_with_what_was_given_up() -> None:
    assert bound_rows(benches.summary()) == [
        ("0.8 %", "10", "106 ms", "110 ms", "0.00 %"),
        ("40.8 %", "10", "116 ms", "120 ms", "25.0 %"),
    ]


def test_the_headline_gives_both_tails() -> None:
    assert headline(benches.summary()) == (
        "95 % of the rounds within 119 ms, Gloo's within 476 ms: 0.25×"
    )
    assert headline(benches.summary(is_alone=True)) == (
        "95 % of the rounds within 119 ms"
    )


def test_it_says_what_was_checked_and_how_far_to_trust_it() -> None:
    assert list(sentences(benches.summary())) == [
        "Exact on every rank, bit for bit, wherever nothing was missing: 33 turns.",
        "The same bytes on every rank wherever chunks were given up: 13 turns.",
        "With 20 rounds the 99th percentile is close to the slowest round.",
        "4 ranks shared 2 cores; the load of this machine was 0.25 before.",
    ]


def test_many_rounds_need_no_warning() -> None:
    assert not any("99th" in one for one in sentences(benches.summary(rounds=100)))


def test_only_what_was_checked_is_told() -> None:
    run = benches.summary()
    exact = msgspec.structs.replace(run, checked=Checked(exact=1, identical=0))
    identical = msgspec.structs.replace(run, checked=Checked(exact=0, identical=1))

    assert [next(sentences(one)) for one in (exact, identical)] == [
        "Exact on every rank, bit for bit, wherever nothing was missing: 1 turn.",
        "The same bytes on every rank wherever chunks were given up: 1 turn.",
    ]
    assert [len(list(sentences(one))) for one in (exact, identical)] == [3, 3]


def test_without_bursts_there_is_no_row_for_them() -> None:
    run = summarise_bench(
        benches.settings(burst=0.0), benches.rounds(9), Checked(exact=1, identical=0)
    )

    assert "burst rounds, median" not in {row.label for row in bench_rows(run)}


def test_the_table_says_what_was_run() -> None:
    told = " ".join(shown(benches.summary()).split())

    assert (
        "4 ranks, 20 MB, 20 rounds, sharded plan; a host for each rank, MTU 1500, 1 % "
        "of the packets lost, 70 % for 50 ms in every 10th round"
    ) in told
    assert "burst rounds, median 115 ms 460 ms" in told


def test_on_loopback_there_is_no_word_of_loss() -> None:
    loopback = benches.summary(hosts=False, mtu=65536, loss=0.0, burst=0.0)

    told = " ".join(shown(loopback).split())

    assert "sharded plan; loopback, MTU 65536 tailbound Gloo" in told


def test_on_hosts_without_bursts_only_the_loss_is_told() -> None:
    told = " ".join(shown(benches.summary(loss=0.0, burst=0.0)).split())

    assert "MTU 1500, 0 % of the packets lost tailbound Gloo" in told

"""The benchmark: tailbound's all-reduce and Gloo's, in turns, over the same network.

Every rank is a process that has joined both; a round is a turn of each, in changing
order, so that a noisy machine hits both. With hosts of their own the ranks' packets are
real, and the switch drops them at random, TCP's as well as UDP's.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import cast

from tailbound.config import LossBound, Plan, require
from tailbound.errors import TailboundError
from tailbound.lab.bench_orders import Finished, Go, Prepare, Settle, Settled, Side
from tailbound.lab.bench_team import Team
from tailbound.lab.hosts import Hosts, make_hosts
from tailbound.lab.machine import versions
from tailbound.lab.orders import Ready
from tailbound.report.bench_outcome import (
    BenchRound,
    BenchSettings,
    BenchSummary,
    Checked,
    Turn,
    summarise_bench,
)
from tailbound.report.text import six_digits

MAX_WORLD = 64
BURST_EVERY = 10
ETHERNET_MTU = 1500
LOOPBACK_MTU = 65536
"""Of every Linux since 3.6."""
HEAD_START_S = 0.01
"""From the last word to the ranks until they all start: pipes are slower than that."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the user chose."""

    world: int = 4
    mbytes: float = 100.0
    rounds: int = 20
    warmup: int = 3
    against: str = "gloo"
    plan: str = "sharded"
    p: float | None = None
    """A fixed bound; None: ``p_low`` and ``p_high``."""
    p_low: float | None = None
    """None: as ``LossBound`` has it."""
    p_high: float | None = None
    hosts: bool = False
    loss: float = 0.0
    burst: float = 0.0
    burst_ms: float = 50.0
    seed: int = 0
    timeout_s: float = 60.0
    command: tuple[str, ...] = (sys.executable, "-m", "tailbound.lab.bench_rank")
    """Of a rank; tests bring other programs."""

    def __post_init__(self) -> None:
        require(
            2 <= self.world <= MAX_WORLD,
            f"--world is 2 to {MAX_WORLD} ranks, not {self.world}",
        )
        require(
            0.000004 <= self.mbytes <= 4000.0,
            f"--mbytes is above 0 and at most 4000, not {self.mbytes}",
        )
        require(self.rounds >= 1, f"--rounds is 1 or more, not {self.rounds}")
        require(self.warmup >= 0, f"--warmup is 0 or more, not {self.warmup}")
        require(self.seed >= 0, f"--seed is 0 or more, not {self.seed}")
        for name, value, allowed in (
            ("against", self.against, ("gloo", "none")),
            ("plan", self.plan, ("sharded", "server")),
        ):
            require(
                value in allowed, f"--{name} is {' or '.join(allowed)}, not {value!r}"
            )
        for name, share in (("--loss", self.loss), ("--burst", self.burst)):
            require(0.0 <= share < 1.0, f"{name} is a share in [0, 1), not {share}")
        require(
            self.hosts or not (self.loss or self.burst),
            "--loss and --burst go with --hosts: the loopback interface loses nothing",
        )
        require(
            not self.burst or self.rounds >= BURST_EVERY,
            f"--burst strikes every {BURST_EVERY}th round: --rounds is {BURST_EVERY} "
            f"or more with it, not {self.rounds}",
        )
        require(
            0.0 < self.burst_ms <= 10_000.0,
            f"--burst-ms is above 0 and at most 10000, not {self.burst_ms}",
        )
        require(
            self.p is None or (self.p_low is None and self.p_high is None),
            "--p is a fixed bound: give either that or --p-low and --p-high",
        )
        self.bound()  # its own checks name the value

    def bound(self) -> LossBound:
        """The loss bound that tailbound gets."""
        if self.p is not None:
            return LossBound.fixed(self.p)
        usual = LossBound()
        return LossBound(
            p_low=usual.p_low if self.p_low is None else self.p_low,
            p_high=usual.p_high if self.p_high is None else self.p_high,
        )

    @property
    def sides(self) -> tuple[Side, ...]:
        """Who takes turns."""
        return ("tailbound", "gloo") if self.against == "gloo" else ("tailbound",)

    def is_burst(self, number: int) -> bool:
        """Whether a burst strikes in a round; warm-up rounds have numbers below 1."""
        return self.burst > 0.0 and number > 0 and number % BURST_EVERY == 0


def run_bench(options: BenchOptions, tell: Told = lambda _: None) -> BenchSummary:
    """Run the benchmark.

    Args:
        options: what to run.
        tell: told what is going on, in a few words, now and then.

    Raises:
        ConfigError: hosts cannot be made here.
        TailboundError: a rank failed, fell silent, or came to a wrong result.
    """
    settings = _settings(options)
    with ExitStack() as stack:
        hosts = None
        if options.hosts:
            tell("making hosts")
            hosts = stack.enter_context(make_hosts(options.world, mtu=ETHERNET_MTU))
        tell("starting ranks")
        team = stack.enter_context(Team(options.world, options.timeout_s))
        team.start(options.command, hosts)
        team.join(
            num_elements=max(1, round(options.mbytes * 1e6 / 4)),
            sides=options.sides,
            plan=cast(Plan, options.plan),
            bound=options.bound(),
            seed=options.seed,
        )
        bench = _Bench(options, team, hosts)
        rounds = []
        for number in range(1 - options.warmup, options.rounds + 1):
            tell(f"round {number} of {options.rounds}" if number > 0 else "warming up")
            done = bench.run_round(number)
            if number > 0:
                rounds.append(done)
    checked = Checked(exact=bench.num_exact, identical=bench.num_identical)
    return summarise_bench(settings, rounds, checked)


class _Bench:
    """Rounds of a team, on hosts or not."""

    def __init__(self, options: BenchOptions, team: Team, hosts: Hosts | None) -> None:
        self._options, self._team, self._hosts = options, team, hosts
        self.num_exact = 0
        self.num_identical = 0
        if hosts is not None:
            hosts.lose(options.loss)

    def run_round(self, number: int) -> BenchRound:
        """Let each side take its turn; who is first changes from round to round."""
        sides = self._options.sides[:: 1 if number % 2 else -1]
        turns = {side: self._take_turn(side, number) for side in sides}
        return BenchRound(
            number=number,
            is_burst=self._options.is_burst(number),
            tailbound=turns["tailbound"],
            gloo=turns.get("gloo"),
        )

    def _take_turn(self, side: Side, number: int) -> Turn:
        team, options = self._team, self._options
        team.ask(Prepare(number - 1 + options.warmup), Ready)
        if options.is_burst(number):
            self._lose(options.burst)
        at_s = time.monotonic() + HEAD_START_S
        team.tell(Go(side, at_s))
        if options.is_burst(number):
            time.sleep(max(0.0, at_s + options.burst_ms / 1e3 - time.monotonic()))
            self._lose(options.loss)
        finished = team.gather(Finished)
        settled = team.ask(Settle(), Settled)
        self._check(side, number, settled)
        sent = [one.wire_bytes for one in settled]
        return Turn(
            latency_ms=six_digits(1e3 * max(one.latency_s for one in finished)),
            user_ms=six_digits(1e3 * fmean(one.user_s for one in settled)),
            system_ms=six_digits(1e3 * fmean(one.system_s for one in settled)),
            # The loopback interface is the same for all.
            wire_mb=(sum(sent) if self._hosts else sent[0]) / 1e6,
            p=settled[0].p,
            missing_share=six_digits(
                sum(one.missing for one in settled)
                / max(1, sum(one.chunks for one in settled))
            ),
        )

    def _lose(self, share: float) -> None:
        assert self._hosts is not None
        self._hosts.lose(share)

    def _check(self, side: Side, number: int, settled: list[Settled]) -> None:
        where = f"{side}'s result of round {number}"
        if any(one.missing for one in settled):
            self.num_identical += 1
            if len({one.digest for one in settled}) > 1:
                raise TailboundError(f"{where} is not the same on all ranks")
            return
        self.num_exact += 1
        wrong = [rank for rank, one in enumerate(settled) if not one.is_exact]
        if wrong:
            raise TailboundError(f"{where} is wrong on rank {wrong[0]}")


def _settings(options: BenchOptions) -> BenchSettings:
    bound = options.bound()
    return BenchSettings(
        world=options.world,
        mbytes=options.mbytes,
        rounds=options.rounds,
        warmup=options.warmup,
        against=options.against,
        plan=options.plan,
        p_low=bound.p_low,
        p_high=bound.p_high,
        hosts=options.hosts,
        mtu=ETHERNET_MTU if options.hosts else LOOPBACK_MTU,
        loss=options.loss,
        burst=options.burst,
        burst_ms=options.burst_ms,
        burst_every=BURST_EVERY,
        seed=options.seed,
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        versions=versions(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )

"""A seeded imitation of a demo's records: what a report is tried on without a run.

200 steps of 3 workers. A round takes as many sends as it needs until what is missing
is within its bound; each send after the first costs a probe's round trip of 1 ms.
"""

import numpy as np

from tailbound.records import EpochReport, Record, RoundReport, StepReport
from tailbound.report.summary import RunSettings

CHUNKS = 400
P_LOW, P_HIGH = 0.008, 0.408
CRITICAL = (range(1, 31), range(121, 131))
EPOCHS, STEPS_OF_EPOCH = 8, 25


def make_settings(**changes: object) -> RunSettings:
    values: dict[str, object] = {
        "task": "digits",
        "workers": 3,
        "epochs": EPOCHS,
        "batch_size": 32,
        "seed": 1,
        "rtt_ms": 1.0,
        "loss": 0.02,
        "burst": 0.7,
        "burst_rounds": [76, 151],
        "p_low": P_LOW,
        "p_high": P_HIGH,
        "mtu": 1500,
        "versions": {"tailbound": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "started": "2026-07-30T12:00:00",
    }
    return RunSettings(**(values | changes))  # type: ignore[arg-type]


def make_records(settings: RunSettings, *, seed: int = 7) -> list[Record]:
    rng = np.random.default_rng(seed)
    return [
        record
        for run in ("fixed", "adaptive")
        for record in make_run(run, settings, rng)
    ]


def make_run(run: str, settings: RunSettings, rng: np.random.Generator) -> list[Record]:
    records: list[Record] = []
    train_s = 0.0
    for step in range(1, settings.epochs * STEPS_OF_EPOCH + 1):
        critical = any(step in span for span in CRITICAL)
        p = P_HIGH if run == "adaptive" and not critical else P_LOW
        loss = settings.burst if step in settings.burst_rounds else settings.loss
        rounds = [
            make_round(run, rank, step, p, critical, loss, settings, rng)
            for rank in range(settings.workers)
        ]
        records += rounds
        exchange_s = max(report.latency_s for report in rounds) + 0.0006
        compute_s = 0.004 + 0.0004 * rng.random()
        train_s += compute_s + exchange_s
        records += [
            make_step(run, report, compute_s, exchange_s, rng) for report in rounds
        ]
        if step % STEPS_OF_EPOCH == 0:
            epoch = step // STEPS_OF_EPOCH
            worse = 0.004 if run == "adaptive" else 0.0
            metric = 0.978 - worse - 0.35 * 0.45**epoch + 0.003 * rng.random()
            records += [
                EpochReport(
                    run=run,
                    rank=rank,
                    epoch=epoch,
                    step=step,
                    metric=metric,
                    metric_name="accuracy",
                    train_s=train_s,
                    digest=f"{run}-{epoch}",
                )
                for rank in range(settings.workers)
            ]
    return records


def make_round(
    run: str,
    rank: int,
    step: int,
    p: float,
    critical: bool,
    loss: float,
    settings: RunSettings,
    rng: np.random.Generator,
) -> RoundReport:
    missing, sent, sends, waiting_s, sending_s = CHUNKS, 0, 0, 0.0, 0.0001
    while sends == 0 or missing > int(p * CHUNKS):
        sent += missing
        sending_s += 4e-7 * missing
        missing = int(rng.binomial(missing, loss))
        waiting_s += 1e-3 * (settings.rtt_ms + 0.08 * rng.exponential())
        sends += 1
    return RoundReport(
        run=run,
        rank=rank,
        step=step,
        counter=step,
        bucket=0,
        direction="in",
        p=p,
        critical=critical,
        num_chunks=CHUNKS,
        num_bytes=CHUNKS * 1440,
        missing=missing,
        sends=sends,
        probes=sends,
        sent=sent,
        retransmitted=sent - CHUNKS,
        latency_s=waiting_s + sending_s,
        waiting_s=waiting_s,
        early_stop=False,
    )


def make_step(
    run: str,
    report: RoundReport,
    compute_s: float,
    exchange_s: float,
    rng: np.random.Generator,
) -> StepReport:
    is_check = report.step % 10 == 0
    ratio = 0.2 * rng.random() + (0.5 if report.critical else 0.0)
    verdict = "critical: 0.5 or more" if report.critical else "not critical"
    return StepReport(
        run=run,
        rank=report.rank,
        step=report.step,
        weight=32.0,
        total_weight=96.0,
        skipped=False,
        compute_s=compute_s,
        exchange_s=exchange_s,
        p=report.p,
        critical=report.critical,
        norm=3.0 / (1.0 + 0.02 * report.step),
        ratio=ratio if is_check else None,
        verdict=verdict if is_check else "no check",
        missing_share=report.missing / CHUNKS,
    )


def one_round(run: str, step: int, **changes: object) -> RoundReport:
    """A way-in round of worker 0: 10 chunks, one send, 1 ms, half of it waiting."""
    values: dict[str, object] = {
        "run": run,
        "rank": 0,
        "step": step,
        "counter": step,
        "bucket": 0,
        "direction": "in",
        "p": P_LOW,
        "critical": False,
        "num_chunks": 10,
        "num_bytes": 14400,
        "missing": 0,
        "sends": 1,
        "probes": 1,
        "sent": 10,
        "retransmitted": 0,
        "latency_s": 0.001,
        "waiting_s": 0.0005,
        "early_stop": False,
    }
    return RoundReport(**(values | changes))  # type: ignore[arg-type]


def one_epoch(run: str, epoch: int, rank: int = 0, **changes: object) -> EpochReport:
    """An epoch of 25 steps: accuracy 0.9, 10 s, digest ``same``."""
    values: dict[str, object] = {
        "run": run,
        "rank": rank,
        "epoch": epoch,
        "step": 25 * epoch,
        "metric": 0.9,
        "metric_name": "accuracy",
        "train_s": 10.0,
        "digest": "same",
    }
    return EpochReport(**(values | changes))  # type: ignore[arg-type]


def one_check(run: str, step: int, rank: int = 0, **changes: object) -> StepReport:
    """A step at which the detector compared norms: ratio 0.25, not critical."""
    values: dict[str, object] = {
        "run": run,
        "rank": rank,
        "step": step,
        "weight": 32.0,
        "total_weight": 96.0,
        "skipped": False,
        "compute_s": 0.004,
        "exchange_s": 0.002,
        "p": P_LOW,
        "critical": False,
        "norm": 2.5,
        "ratio": 0.25,
        "verdict": "not critical",
        "missing_share": 0.0,
    }
    return StepReport(**(values | changes))  # type: ignore[arg-type]

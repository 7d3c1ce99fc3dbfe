"""Read a run's records: where the time of a round went, and what was given up.

    python examples/records.py runs/demo-20260101-120000/rounds.jsonl

Any file of records does: the demo's, or what a job wrote through
``attach(on_record=tailbound.RecordWriter(path))``. Needs no torch.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from tailbound import ConfigError
from tailbound.records import RoundReport, StepReport, read_lines

SLOWEST = 3


def describe(run: str, way_in: list[RoundReport], steps: list[StepReport]) -> None:
    """Print one run's latencies, losses and slowest rounds."""
    latency_R = np.array([report.latency_s for report in way_in])
    p50_s, p99_s = np.percentile(latency_R, (50, 99))
    waiting = sum(report.waiting_s for report in way_in) / latency_R.sum()
    chunks = sum(report.num_chunks for report in way_in)
    missing = sum(report.missing for report in way_in)
    sent = sum(report.sent for report in way_in)
    resent = sum(report.retransmitted for report in way_in)
    print(f"run {run or '(no label)'}: {len(way_in)} rounds to the server")
    print(f"  latency: median {1e3 * p50_s:.2f} ms, p99 {1e3 * p99_s:.2f} ms")
    print(f"  of it between a probe and its answer: {waiting:.0%}")
    print(f"  given up: {missing} of {chunks} chunks ({missing / chunks:.2%})")
    print(f"  sent again: {resent} of {sent} datagrams ({resent / sent:.2%})")
    critical = sum(report.critical for report in steps)
    print(f"  steps in the critical regime: {critical} of {len(steps)}")
    for report in sorted(way_in, key=lambda r: -r.latency_s)[:SLOWEST]:
        print(
            f"  slow: step {report.step}, rank {report.rank}, "
            f"{1e3 * report.latency_s:.1f} ms, {report.probes} probes, "
            f"bound {report.p:.1%}, {report.missing} chunks missing"
        )


def main(path: Path) -> None:
    way_in: dict[str, list[RoundReport]] = defaultdict(list)
    steps: dict[str, list[StepReport]] = defaultdict(list)
    for record in read_lines(path):
        if isinstance(record, RoundReport) and record.direction == "in":
            way_in[record.run].append(record)
        elif isinstance(record, StepReport):
            steps[record.run].append(record)
    if not way_in:
        sys.exit(f"{path} holds no round to a server")
    for run, reports in way_in.items():
        describe(run, reports, steps[run])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: records.py FILE of JSON lines, such as a run's rounds.jsonl")
    try:
        main(Path(sys.argv[1]))
    except (OSError, ConfigError) as error:
        sys.exit(f"records.py: {error}")

"""What every record of a benchmark holds beside its figures."""

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tailbound.lab.machine import versions


def write_record(
    out: Path, benchmark: str, options: argparse.Namespace, **found: Any
) -> None:
    """Keep what was found, with the options, the versions and the machine."""
    configuration = {key: value for key, value in vars(options).items() if key != "out"}
    record = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "configuration": configuration,
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **found,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")

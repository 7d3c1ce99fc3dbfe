"""What a result is to be read with: the versions that it was made with."""

import platform
import sys
from importlib import metadata


def versions() -> dict[str, str]:
    """Of Python, kernel and packages, by name; those not installed are left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("tailbound", "torch", "numpy", "scikit-learn", "mnist1d"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["platform"] = f"{sys.platform} {platform.machine()}"
    return found

"""What a result is to be read with: the versions that it was made with."""

import platform
import sys
from importlib import metadata


def versions(*packages: str) -> dict[str, str]:
    """Of Python, the kernel, tailbound, torch, NumPy and further packages, by name.

    Args:
        packages: as the registry names them; those not installed are left out.
    """
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("tailbound", "torch", "numpy", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["platform"] = f"{sys.platform} {platform.machine()}"
    return found

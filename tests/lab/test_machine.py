"""The versions that a result is read with."""

import platform
from importlib import metadata

import numpy as np

from tailbound.lab.machine import versions


def test_versions_name_what_is_installed_and_nothing_else() -> None:
    found = versions("msgspec", "no-such-package")

    assert found["numpy"] == np.__version__
    assert found["python"] == platform.python_version()
    assert found["kernel"] == platform.release()
    assert found["msgspec"] == metadata.version("msgspec")
    assert "no-such-package" not in found

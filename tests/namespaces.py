"""What tests need that make hosts of their own (``tailbound.lab.hosts``)."""

import pytest

from tailbound.lab.hosts import Hosts, find_obstacle, make_hosts

__all__ = ["Hosts", "make_hosts", "needs_namespaces"]

needs_namespaces = pytest.mark.skipif(
    find_obstacle() is not None, reason=str(find_obstacle())
)

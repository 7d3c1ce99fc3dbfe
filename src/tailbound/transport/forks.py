"""Keep sockets out of forked children.

A forked data loader that kept our sockets would keep ports busy and make a dead rank
look alive (FIELD A08). Close-on-exec, Python's default, covers new programs only.
"""

import os
import weakref
from typing import Protocol


class Closeable(Protocol):
    """Whatever has a file descriptor to give back."""

    def close(self) -> None:
        """Give it back."""


def close_in_forked_children(resource: Closeable) -> None:
    """Close it in every child forked from now on, as long as it lives.

    Args:
        resource: a socket or its owner; held by a weak reference.
    """
    _open.add(resource)


def _close_all() -> None:  # pragma: no cover (runs in the child, unmeasured)
    for resource in tuple(_open):
        resource.close()


_open: "weakref.WeakSet[Closeable]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all)

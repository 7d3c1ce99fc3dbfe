"""Public fakes: a bad network in memory, and a clock that tests move.

impaired_path   what a bad network does to one receiving path
fake_net        whole jobs over such paths, on a virtual clock, without sockets
"""

from tailbound.testing.fake_net import FakeNet
from tailbound.testing.impaired_path import ImpairedPath

__all__ = ["FakeNet", "ImpairedPath"]

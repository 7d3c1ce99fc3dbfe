"""Public fakes: a bad network in memory, and a clock that tests move.

impaired_path   what a bad network does to one receiving path
fake_links      endpoints over such paths, on a virtual clock, without sockets
fake_net        a whole job of the server plan
fake_mesh       a whole job of the sharded plan
"""

from tailbound.testing.fake_mesh import FakeMesh
from tailbound.testing.fake_net import FakeNet
from tailbound.testing.impaired_path import ImpairedPath

__all__ = ["FakeMesh", "FakeNet", "ImpairedPath"]

"""Settings that all tests share."""

import random
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

# Deterministic: a failure in CI is a failure here. No deadline: a shared machine may
# stop for a moment in any example.
settings.register_profile("tailbound", derandomize=True, deadline=None)
settings.load_profile("tailbound")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--shuffle SEED``."""
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run modules, and the tests of each, in an order drawn with this seed",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Shuffle if asked: no test may need another one before it.

    Modules stay together, since some make a job that all their tests look at.
    """
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    rng = random.Random(seed)
    modules = [list(group) for _, group in groupby(items, module_of)]
    rng.shuffle(modules)
    for module in modules:
        rng.shuffle(module)
    items[:] = [item for module in modules for item in module]


def module_of(item: pytest.Item) -> Path:
    """Of one test."""
    return item.path

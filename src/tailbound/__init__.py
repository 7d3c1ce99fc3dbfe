"""tailbound: bound both tails of a synchronous PyTorch training step.

Public names, by what they are for; each is imported when first asked for, so that the
plain import loads neither torch nor matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailbound.config import LossBound, Transport
    from tailbound.errors import (
        ConfigError,
        HandshakeError,
        JobClosedError,
        MissingExtraError,
        PeerLostError,
        PeerProtocolError,
        RemoteError,
        RoundTimeoutError,
        ShapeError,
        TailboundError,
        UnreachableError,
    )
    from tailbound.impairments import (
        BurstLoss,
        GilbertElliottLoss,
        Impairments,
        IndependentLoss,
    )
    from tailbound.records import EpochReport, RecordWriter, RoundReport, StepReport
    from tailbound.training.job import Job, attach
    from tailbound.transport.group import Server

__version__ = "0.1.0"

_HOME = {
    # the job
    "attach": "training.job",
    "Job": "training.job",
    # settings
    "LossBound": "config",
    "Transport": "config",
    # records
    "EpochReport": "records",
    "RecordWriter": "records",
    "RoundReport": "records",
    "StepReport": "records",
    # the server as an object
    "Server": "transport.group",
    # a bad network, for tests
    "BurstLoss": "impairments",
    "GilbertElliottLoss": "impairments",
    "Impairments": "impairments",
    "IndependentLoss": "impairments",
    # errors
    "ConfigError": "errors",
    "HandshakeError": "errors",
    "JobClosedError": "errors",
    "MissingExtraError": "errors",
    "PeerLostError": "errors",
    "PeerProtocolError": "errors",
    "RemoteError": "errors",
    "RoundTimeoutError": "errors",
    "ShapeError": "errors",
    "TailboundError": "errors",
    "UnreachableError": "errors",
}

__all__ = [
    "BurstLoss",
    "ConfigError",
    "EpochReport",
    "GilbertElliottLoss",
    "HandshakeError",
    "Impairments",
    "IndependentLoss",
    "Job",
    "JobClosedError",
    "LossBound",
    "MissingExtraError",
    "PeerLostError",
    "PeerProtocolError",
    "RecordWriter",
    "RemoteError",
    "RoundReport",
    "RoundTimeoutError",
    "Server",
    "ShapeError",
    "StepReport",
    "TailboundError",
    "Transport",
    "UnreachableError",
    "attach",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tailbound' has no attribute {name!r}")
    value = getattr(import_module(f"tailbound.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""tailbound: bound both tails of a synchronous PyTorch training step.

Public names, by what they are for; each is imported when first asked for, so that the
plain import loads neither torch nor matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailbound.config import Certificates, ComputeBound, LossBound, Transport
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
    from tailbound.records import (
        EpochReport,
        RecordWriter,
        RoundReport,
        StepReport,
        ThresholdReport,
    )
    from tailbound.training.attaching import attach
    from tailbound.training.hook import DdpState, bounded_allreduce, ddp_state
    from tailbound.training.job import Job
    from tailbound.training.local_sgd import LocalSGD
    from tailbound.training.record import record_latencies
    from tailbound.training.samplers import ResamplingSampler
    from tailbound.transport.group import Server

__version__ = "0.1.0"

_HOME = {
    # the job
    "attach": "training.attaching",
    "Job": "training.job",
    "LocalSGD": "training.local_sgd",
    "ResamplingSampler": "training.samplers",
    "record_latencies": "training.record",
    # a communication hook for DistributedDataParallel
    "DdpState": "training.hook",
    "bounded_allreduce": "training.hook",
    "ddp_state": "training.hook",
    # settings
    "Certificates": "config",
    "ComputeBound": "config",
    "LossBound": "config",
    "Transport": "config",
    # records
    "EpochReport": "records",
    "RecordWriter": "records",
    "RoundReport": "records",
    "StepReport": "records",
    "ThresholdReport": "records",
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
    "Certificates",
    "ComputeBound",
    "ConfigError",
    "DdpState",
    "EpochReport",
    "GilbertElliottLoss",
    "HandshakeError",
    "Impairments",
    "IndependentLoss",
    "Job",
    "JobClosedError",
    "LocalSGD",
    "LossBound",
    "MissingExtraError",
    "PeerLostError",
    "PeerProtocolError",
    "RecordWriter",
    "RemoteError",
    "ResamplingSampler",
    "RoundReport",
    "RoundTimeoutError",
    "Server",
    "ShapeError",
    "StepReport",
    "TailboundError",
    "ThresholdReport",
    "Transport",
    "UnreachableError",
    "attach",
    "bounded_allreduce",
    "ddp_state",
    "record_latencies",
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

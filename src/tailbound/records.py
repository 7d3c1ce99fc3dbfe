"""What a run leaves behind: a record per round, step, decision, epoch, as JSON lines.

Everything that draws or exports reads nothing else. Times are seconds, durations are
measured on one clock of one process, counts are of chunks unless a name says bytes.
A file of records is UTF-8, one JSON object a line; the field ``kind`` tells which
record it is. Fields may be added, never renamed. JSON has no NaN: a number that is
not finite is written as null.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import force_setattr

from tailbound.errors import ConfigError

if TYPE_CHECKING:
    NullableFloat = float
else:
    # The decoder's view: null is let in, and becomes NaN in __post_init__.
    NullableFloat = float | None


class RoundReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="round", tag_field="kind"
):
    """One bucket's way between one worker and the server (spec N11)."""

    run: str = ""
    """Label of the run, such as ``fixed`` or ``adaptive``."""
    rank: int
    """The worker on this link."""
    step: int
    """Optimizer step, from 1."""
    counter: int
    """The round's counter on the wire, from 1."""
    bucket: int
    """Which bucket of the step."""
    direction: Literal["in", "back"]
    """``in``: gradient to the server (lossy). ``back``: mean to the worker (exact,
    but for ``LossBound.p_back``)."""
    p: float
    """Loss bound of this round, a share in [0, 1)."""
    critical: bool
    """True if the round ran under the critical regime's bound."""
    num_chunks: int
    """Chunks of the bucket."""
    num_bytes: int
    """Payload bytes of the bucket."""
    missing: int
    """Chunks missing when the round closed."""
    sends: int
    """Passes over the data: 1 plus the number of repairs."""
    probes: int
    """Control round trips: probes sent (way in) or answered (way back)."""
    sent: int
    """Datagrams handed to the kernel (way in) or received (way back)."""
    retransmitted: int
    """Those of ``sent`` that were repairs (way in) or duplicates (way back)."""
    latency_s: float
    """Way in: first datagram handed to the kernel until stop received. Way back:
    its first sign until closed."""
    waiting_s: float
    """Part of latency_s between a probe and its answer: the round trips."""
    early_stop: bool
    """The stop came while the sender still had chunks to send (spec N4)."""
    given_up: int = 0
    """Those of ``missing`` that the bound did not allow: the owner closed at its
    deadline (``LossBound.deadline_s``)."""


class StepReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"
):
    """One optimizer step as one rank saw it."""

    run: str = ""
    rank: int
    step: int
    weight: float
    """What this rank contributed (samples, tokens or micro-batches)."""
    total_weight: float
    """The same summed over ranks; 0 means that the step was skipped everywhere."""
    skipped: bool
    """True if no rank had anything and the optimizer did not step."""
    compute_s: float
    """From the end of the last step to the start of the exchange."""
    exchange_s: float
    """The all-reduce, waiting for slower ranks included."""
    p: float
    """Loss bound that held in this step."""
    critical: bool
    """Regime that held in this step."""
    norm: NullableFloat
    """L2 norm of the reduced gradient, corrected for holes if so set; NaN if it was
    not finite."""
    ratio: float | None
    """Relative change that the detector compared with eta; None: no check here, or
    the norm before was 0."""
    verdict: str
    """What the detector said after this step, and why."""
    missing_share: float
    """Chunks that this rank's gradient lost, over all its chunks."""
    loss: float | None = None
    """Training loss, if the caller told it and it was finite."""
    planned: int = 0
    """Micro-batches that this rank planned (M); 0 in records of older versions."""
    computed: float = 0.0
    """Those that it finished before the threshold, and the part of an unfinished one
    that is in its gradient, ``partial_share``."""
    total_planned: int = 0
    """``planned``, summed over ranks."""
    total_computed: float = 0.0
    """``computed``, summed over ranks."""
    threshold_s: float | None = None
    """Compute time after which this step was cut (tau); None: it was not bounded."""
    overshoot_s: float | None = None
    """How long after the threshold this rank stopped; None: it was not cut."""
    partial_share: float = 0.0
    """Share of the gradient's elements that an unfinished micro-batch reached, kept
    with ``preempt="backward"``; 0 where there is none."""
    latency_s: tuple[float, ...] = ()
    """Compute time of each finished micro-batch; waiting for peers never counts."""
    drift: float | None = None
    """How far this rank's parameters were from the owners' when they were made equal
    after this step: L2 norm of the difference over that of the parameters. None: they
    were not (``LossBound.p_back``)."""
    loss_scale: float = 1.0
    """Factor that losses and gradients carried; ``loss`` and ``norm`` are without."""
    non_finite: bool = False
    """The reduced gradient had inf or NaN. The detector ignored it; with a GradScaler
    no optimizer stepped, on any rank."""

    def __post_init__(self) -> None:
        restore_nan(self, "norm", self.norm)


class ThresholdReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="threshold", tag_field="kind"
):
    """What the compute bound decided after a step, and what its last choice brought.

    Written by every rank, with equal content, after the calibration, after every
    ``retune_every`` steps, and by the last step. Letters: W ranks, K points of a curve.
    """

    run: str = ""
    rank: int
    step: int
    """The step after which it was decided."""
    threshold_s: float | None
    """In force from the next step; None: nothing to gain, so none."""
    predicted_step_s: float | None
    """Mean time of a step (compute and exchange) with this threshold."""
    predicted_speedup: float | None
    """Effective speedup (spec C3): steps are faster, and count for less."""
    predicted_drop: float | None
    """Expected share of dropped micro-batches."""
    calibration_step_s: float | None
    """Mean time of a calibration step (compute and exchange); None before."""
    realised_step_s: float | None
    """The same over the bounded steps since the last report; None: there were none."""
    realised_speedup: float | None
    """calibration_step_s / realised_step_s, times the share that was kept."""
    dropped_share_W: tuple[float, ...]
    """Share of dropped micro-batches of each rank since the last report."""
    relative_score_W: tuple[float, ...]
    """Fastest rank's mean micro-batch time over this rank's, 0 to 1: 1 is fastest."""
    individual_score_W: tuple[float, ...]
    """Best mean that this rank ever had over its mean now, 0 to 1: 1 is its best."""
    persistent_stragglers: tuple[int, ...]
    """Ranks that are slow all the time: no threshold helps, see ``verdict``."""
    verdict: str
    """The decision in a sentence."""
    imputed_share: float = 0.0
    """Share of samples that a threshold had cut and that were filled in."""
    curve_threshold_s_K: tuple[float, ...] = ()
    curve_speedup_K: tuple[float, ...] = ()
    curve_drop_K: tuple[float, ...] = ()


class EpochReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="epoch", tag_field="kind"
):
    """The end of an epoch: metric on held-out data, and that replicas are equal."""

    run: str = ""
    rank: int
    epoch: int
    """From 1."""
    step: int
    """Steps done so far."""
    metric: NullableFloat
    """The task's metric; see ``metric_name``. NaN if the training diverged."""
    metric_name: str
    """Such as ``accuracy``; higher is better unless it is ``perplexity``."""
    train_s: float
    """Training time so far, evaluation left out, in seconds."""
    digest: str
    """Hex digest of the parameters, bit exact; equal on all ranks."""

    def __post_init__(self) -> None:
        restore_nan(self, "metric", self.metric)


Record = RoundReport | StepReport | ThresholdReport | EpochReport

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def to_line(record: Record) -> bytes:
    """Encode one record as a JSON line, newline included."""
    return _encoder.encode(record) + b"\n"


def from_line(line: bytes | str) -> Record:
    """Decode one JSON line.

    Raises:
        ConfigError: the line is no record; the message says why.
    """
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a record: {error}") from error


class RecordWriter:
    """Appends records to a file as they are made; give it to ``attach(on_record=)``.

    Each line is flushed at once, so a crash loses none.

    Args:
        path: the file; its folder is made, an existing file is continued.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def __call__(self, record: Record) -> None:
        """Append one record."""
        self._file.write(to_line(record))

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write records to a file of JSON lines, replacing what was there."""
    with path.open("wb") as file:
        file.writelines(to_line(record) for record in records)


def read_lines(path: Path) -> Iterator[Record]:
    """Read a file of JSON lines; a last line cut short by a crash is left out.

    Raises:
        ConfigError: a line is no record; names the file and the line number.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            if not line.isspace():
                try:
                    yield from_line(line)
                except ConfigError as error:
                    raise ConfigError(f"{path}:{number}: {error}") from error


def restore_nan(record: msgspec.Struct, name: str, value: float | None) -> None:
    """Turn a null that was read back into the NaN that was written."""
    if value is None:
        force_setattr(record, name, math.nan)

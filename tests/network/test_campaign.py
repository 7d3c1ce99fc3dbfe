"""2000 seeded rounds over bad networks, each checked to the last bit.

Every job draws its shape (workers, buckets, dtypes, lengths, loss bound, weights) and
its network (loss, bursts, duplicates, reordering, jitter, delay, small windows) from
its seed, and forged datagrams full of NaN are put onto the links all the while. A
failure names the seed; ``run_job(seed)`` replays it.

Values: rank r sends 2**r times an odd integer that every element draws anew in every
round. A sum of several ranks is exact in the accumulator, and what arrived can be read
off the mean: each chunk must be the mean of one subset of the ranks, rounded once.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tailbound.config import Holes, LossBound, Order
from tailbound.impairments import (
    BurstLoss,
    GilbertElliottLoss,
    Impairments,
    IndependentLoss,
    LossModel,
)
from tailbound.protocol.events import SERVER_RANK, Direction, Reduced, RoundKey
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.wire import make_header
from tailbound.reduction import masked_mean
from tailbound.testing import FakeNet

JOBS = 250
ROUNDS = 8
"""Of each job: 2000 in total."""
JOBS_PER_TEST = 10

DELTA = 1e-9
"""Probability that a round exceeds the bound of sends by bad luck."""
HOLES: tuple[Holes, ...] = ("zero", "received_mean")
ORDERS: tuple[Order, ...] = ("rotate", "fixed", "norm")
BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
WIRE = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def worst_loss(losses: tuple[LossModel, ...]) -> float:
    """Largest probability, over all pasts, that the next datagram is lost."""
    arrives = 1.0
    for loss in losses:
        if isinstance(loss, GilbertElliottLoss):
            after_good = loss.to_bad * loss.loss_bad + (1 - loss.to_bad) * (
                loss.loss_good
            )
            after_bad = (1 - loss.to_good) * loss.loss_bad + (
                loss.to_good * loss.loss_good
            )
            arrives *= 1 - max(after_good, after_bad)
        else:
            arrives *= 1 - loss.rate
    return 1 - arrives


def most_sends(num_chunks: int, losses: tuple[LossModel, ...]) -> int:
    """The number of sends that a round exceeds with probability DELTA at most.

    A chunk is sent again in every pass until the receiver has it. Let l be the largest
    probability, whatever happened before, that a datagram is lost: for independent loss
    the rate; for a Gilbert-Elliott chain the larger of the probabilities after a good
    and after a bad datagram (the chain is Markov, so no other past matters); for models
    side by side 1 - (1 - l1)(1 - l2)... Then a chunk is lost s times in a row with
    probability l**s at most, and any of n chunks with n * l**s (union bound). That is
    DELTA or less once s >= ln(n / DELTA) / ln(1 / l).

    One send more, since a datagram that is held back may arrive after the probe that
    was sent behind it and before the next: with one-way delay d a probe arrives at
    least 2 d after the one before, and the jobs below hold datagrams back by 2 d at
    most. A bound p > 0 only ends rounds earlier.
    """
    loss = worst_loss(losses)
    needed = math.log(num_chunks / DELTA) / math.log(1 / loss) if loss else 0.0
    return max(1, math.ceil(needed)) + 1


@dataclass(frozen=True)
class Scenario:
    world_size: int
    buckets: tuple[BucketSpec, ...]
    bound: LossBound
    to_server: Impairments
    to_worker: Impairments
    mtu: int
    window_bytes: int
    forge_share: float


def draw_losses(rng: np.random.Generator) -> tuple[LossModel, ...]:
    kind = rng.choice(["none", "light", "heavy", "chain", "burst", "both"])
    independent = IndependentLoss(rate=float(rng.uniform(0.0, 0.1)))
    burst = BurstLoss(rate=0.7, rounds=(2, 5, 6))
    chain = GilbertElliottLoss(
        to_bad=float(rng.uniform(0.01, 0.2)),
        to_good=float(rng.uniform(0.1, 0.6)),
        loss_good=float(rng.choice([0.0, 0.02])),
        loss_bad=float(rng.uniform(0.5, 0.95)),
    )
    by_kind: dict[str, tuple[LossModel, ...]] = {
        "none": (),
        "light": (independent,),
        "heavy": (IndependentLoss(rate=float(rng.uniform(0.1, 0.9))),),
        "chain": (chain,),
        "burst": (burst,),
        "both": (independent, burst),
    }
    return by_kind[str(kind)]


def draw_scenario(rng: np.random.Generator) -> Scenario:
    mtu = int(rng.choice([576, 576, 576, 700, 1500]))
    dtypes = rng.choice(list(WIRE), size=int(rng.integers(1, 4)))
    buckets = []
    for dtype in map(str, dtypes):
        elements_per_chunk = (mtu - 52) // np.dtype(WIRE[dtype]).itemsize
        num_chunks = int(np.exp(rng.uniform(0.0, np.log(200.0))))
        num = max(1, num_chunks * elements_per_chunk - int(rng.integers(0, 40)))
        cut = int(rng.integers(0, num + 1))
        buckets.append(BucketSpec(dtype, ("a", "b"), ((cut,), (num - cut, 1))))
    p_low, p_high = sorted(rng.choice([0.0, 0.008, 0.05, 0.29, 0.408, 0.7], size=2))
    bound = LossBound(
        p_low=float(p_low),
        p_high=float(p_high),
        frequency=int(rng.integers(1, 4)),
        holes=HOLES[rng.integers(2)],
        order=ORDERS[rng.integers(3)],
    )
    delay_s = float(rng.choice([0.0, 0.0005, 0.001, 0.005]))
    both = {"delay_s": delay_s}
    if delay_s >= 0.001 and rng.random() < 0.5:
        # Held back by 2 d at most, see most_sends.
        both["jitter_s"] = float(rng.choice([0.0, delay_s]))
        both["reorder_share"] = float(rng.choice([0.0, 0.1, 0.5]))
    if rng.random() < 0.4:
        both["duplicate_share"] = float(rng.uniform(0.0, 0.5))
    return Scenario(
        world_size=int(rng.integers(1, 6)),
        buckets=tuple(buckets),
        bound=bound,
        to_server=Impairments(losses=draw_losses(rng), **both),  # type: ignore[arg-type]
        to_worker=Impairments(losses=draw_losses(rng), **both),  # type: ignore[arg-type]
        mtu=mtu,
        window_bytes=int(rng.choice([1, 1 << 22])),
        forge_share=float(rng.choice([0.0, 0.2, 1.0])),
    )


class Forger:
    """Puts datagrams that must be ignored onto random links; all data is NaN."""

    def __init__(self, net: FakeNet, scenario: Scenario, rng: np.random.Generator):
        self.net, self.scenario, self.rng = net, scenario, rng
        self.session = net.server.session
        self.counter = self.num_full = self.room = 1
        self.num = {"stale": 0, "foreign": 0, "malformed": 0}

    def forge(self) -> None:
        rng = self.rng
        if rng.random() >= self.scenario.forge_share:
            return
        rank = int(rng.integers(self.scenario.world_size))
        to_server = bool(rng.integers(2))
        fate = str(rng.choice(list(self.num)))
        self.num[fate] += 1
        self.net.inject(rank, self.datagram(fate, rank, to_server), to_server=to_server)

    def datagram(self, fate: str, rank: int, to_server: bool) -> bytes:
        rng, counter = self.rng, self.counter
        num_buckets = len(self.scenario.buckets)
        direction = Direction.IN if to_server else Direction.BACK
        sender = rank if to_server else SERVER_RANK
        session, bucket = self.session, (counter - 1) % num_buckets
        room = self.room
        sequence, length, version, size = 0, room, 1, None
        if fate == "stale":
            match rng.integers(3):
                case 0:
                    # Not the next one: for the server it may be open already.
                    counter += int(rng.choice([-2, -1, 2, 3, 1000]))
                    bucket = (counter - 1) % num_buckets
                case 1:
                    direction = Direction(1 - direction)
                case _:
                    bucket = num_buckets
        elif fate == "foreign":
            if rng.integers(2):
                session += int(rng.choice([-1, 1, 1 << 40]))
            else:
                sender = int(rng.choice([sender ^ 1, 77]))
        else:
            match rng.integers(5):
                case 0:
                    sequence = int(rng.choice([self.num_full, 2**32 - 1]))
                case 1:
                    length = int(rng.choice([0, room - 1, 65535]))
                case 2:
                    version = 2
                case 3:
                    size = int(rng.integers(1, 24))
                case _:
                    return rng.bytes(int(rng.integers(1, 200)))
        key = RoundKey(max(counter, 0), bucket, direction)
        header = make_header(key, session, sender)
        header["sequence"], header["length"] = sequence, length
        header["version"] = version
        return (header.tobytes() + b"\xff" * room)[:size]


def rounded(values: Any, dtype: str) -> Any:
    """Round float64 to the dtype's number of bits, ties to even; still float64."""
    mantissa, exponent = np.frexp(values)
    bits = BITS[dtype]
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def to_wire(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4")
        assert not (bits & 0xFFFF).any(), "a value of the test is no bfloat16"
        return (bits >> 16).astype("<u2")
    return values.astype(WIRE[dtype])


def from_wire(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (values.astype("<u4") << 16).view("<f4").astype(np.float64)
    return values.astype(np.float64)


class Mean:
    """Reads off a reduced bucket which ranks' chunks are in it."""

    def __init__(
        self,
        values_N: Any,
        elements_per_chunk: int,
        weight_W: list[float],
        dtype: str,
        holes: str,
    ) -> None:
        self.weight_W = np.array(weight_W)
        self.dtype, self.holes = dtype, holes
        num_chunks = -(-len(values_N) // elements_per_chunk)
        padded = np.zeros(num_chunks * elements_per_chunk)
        padded[: len(values_N)] = values_N
        self.base_CE = padded.reshape(num_chunks, elements_per_chunk)

    def of_subset(self, base_CE: Any, ranks: tuple[int, ...]) -> Any:
        """The exact mean if only these ranks' chunks arrived, rounded once."""
        flat_N = base_CE.reshape(-1)
        scale_W = 2.0 ** np.arange(len(self.weight_W))
        # masked_mean takes gradients before they were multiplied by the weight.
        divisor_W = np.where(self.weight_W > 0, self.weight_W, 1.0)
        grad_WN = scale_W[:, None] / divisor_W[:, None] * flat_N
        arrived_WN = np.zeros(grad_WN.shape, bool)
        arrived_WN[list(ranks)] = True
        if self.holes == "zero":
            grad_WN = np.where(arrived_WN, grad_WN, 0.0)
            arrived_WN[:] = True
        mean_N, _ = masked_mean(grad_WN, arrived_WN, self.weight_W)
        return rounded(mean_N, self.dtype).reshape(base_CE.shape)

    def arrived(self, mean_N: Any) -> tuple[Any, bool]:
        """For each rank with a weight, which chunks are in the mean.

        Returns:
            arrived_WC, and whether no other subsets explain the mean as well.
        """
        num_chunks, num_elements = self.base_CE.shape
        padded = np.zeros(num_chunks * num_elements)
        padded[: len(mean_N)] = mean_N
        mean_CE = padded.reshape(num_chunks, num_elements)
        ranks = tuple(np.flatnonzero(self.weight_W).tolist())
        arrived_WC = np.zeros((len(self.weight_W), num_chunks), bool)
        open_C = np.arange(num_chunks)
        for num in range(len(ranks), -1, -1):
            for subset in itertools.combinations(ranks, num):
                if not len(open_C):
                    break
                expected_CE = self.of_subset(self.base_CE[open_C], subset)
                same_C = (expected_CE == mean_CE[open_C]).all(axis=1)
                arrived_WC[np.ix_(subset, open_C[same_C])] = True
                open_C = open_C[~same_C]
        assert not len(open_C), f"chunks {open_C.tolist()} are no mean of any ranks"
        return arrived_WC, self.holes == "zero"


def floor_share(p: float, num_chunks: int) -> int:
    """floor(p * n) of the decimal number that was written, never all."""
    return min(int(Fraction(str(p)) * num_chunks), num_chunks - 1)


def check_round(
    net: FakeNet,
    scenario: Scenario,
    forger: Forger,
    rng: np.random.Generator,
    room_bytes: int,
) -> None:
    counter = forger.counter
    spec = scenario.buckets[(counter - 1) % len(scenario.buckets)]
    dtype, num = spec.dtype, spec.num_elements
    elements_per_chunk = room_bytes // np.dtype(WIRE[dtype]).itemsize
    num_chunks = -(-num // elements_per_chunk)
    forger.num_full = num // elements_per_chunk
    forger.room = room_bytes - room_bytes % np.dtype(WIRE[dtype]).itemsize
    weight_W = [
        float(w) for w in rng.choice([0.0, 0.5, 1, 1, 1, 2], scenario.world_size)
    ]
    sign = -1.0 if counter % 2 else 1.0
    base_N = sign * (2.0 * rng.integers(0, 128, num) + 1.0)
    sent_W = [to_wire(base_N * 2.0**rank, dtype) for rank in range(len(weight_W))]
    grad_W = [sent.copy() for sent in sent_W]

    net.begin(grad_W, weight_W)
    events = net.run_until(Reduced)

    assert [event.counter for event in events] == [counter] * len(events)
    assert {event.total_weight for event in events} == {sum(weight_W)}
    if sum(weight_W) == 0:
        for grad, sent in zip(grad_W, sent_W, strict=True):
            assert grad.tobytes() == sent.tobytes()
        return
    assert len({grad.tobytes() for grad in grad_W}) == 1, "replicas differ"
    mean = Mean(base_N, elements_per_chunk, weight_W, dtype, scenario.bound.holes)
    arrived_WC, is_unique = mean.arrived(from_wire(grad_W[0], dtype))
    for rank, event in enumerate(events):
        assert event.p in (scenario.bound.p_low, scenario.bound.p_high)
        for report in event.reports:
            assert report.num_chunks == num_chunks
            is_in = report.direction == "in"
            allowed = floor_share(event.p, num_chunks) if is_in else 0
            assert report.missing <= allowed
            losses = (scenario.to_server if is_in else scenario.to_worker).losses
            most = most_sends(num_chunks, losses)
            assert report.sends <= most, f"{report.sends} sends, not {most}"
            if is_in and is_unique:
                missing = int(np.count_nonzero(~arrived_WC[rank]))
                assert missing == report.missing


def run_job(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scenario = draw_scenario(rng)
    try:
        net = FakeNet(
            scenario.world_size,
            scenario.buckets,
            scenario.bound,
            to_server=scenario.to_server,
            to_worker=scenario.to_worker,
            seed=seed,
            mtu=scenario.mtu,
            window_bytes=scenario.window_bytes,
            first_counter=1,
            tick_s=0.0001,
        )
        room_bytes = net.start()[0].payload_bytes
        forger = Forger(net, scenario, rng)
        net.on_turn = forger.forge
        for counter in range(1, ROUNDS + 1):
            forger.counter = counter
            check_round(net, scenario, forger, rng, room_bytes)
        net.close()
        counters = sum(
            (worker.counters() for worker in net.workers), net.server.counters()
        )
        assert counters.foreign <= forger.num["foreign"]
        assert counters.malformed <= forger.num["malformed"]
        useless = counters.foreign + counters.malformed + counters.stale
        assert useless >= sum(forger.num.values())
    except BaseException as error:
        error.add_note(f"seed {seed}: {scenario}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, JOBS, JOBS_PER_TEST))
def test_every_round_is_exact_where_it_arrived_and_bounded_where_not(
    first: int,
) -> None:
    for seed in range(first, first + JOBS_PER_TEST):
        run_job(seed)

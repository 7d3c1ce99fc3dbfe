"""The endpoint of a rank in a mesh: one link to every other rank (the sharded plan).

Rounds are matched across ranks by the order of calls. Several may be open at once, and
a rank that is ahead may open one here before its call: its data is taken in as soon as
the bucket's shape is known, from its announcement or from the step before.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import ConfigError, PeerProtocolError, WireError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, Reduced, RoundKey, peer_name
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.ledger import RoundSum, StepLedger
from tailbound.protocol.mesh_checks import (
    check_begin,
    check_begin_untrusted,
    compare_begins,
)
from tailbound.protocol.mesh_meeting import MeshMember
from tailbound.protocol.mesh_plan import MeshPlan
from tailbound.protocol.mesh_reports import describe_round
from tailbound.protocol.mesh_round import MeshRound
from tailbound.protocol.messages import Message, ShardBegin, ShardMean
from tailbound.protocol.plan import Limits
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.sender import Sender, SenderState
from tailbound.protocol.wire import COUNTER_PERIOD
from tailbound.reduction import FORMATS, WireFormat
from tailbound.regime import Decision

MAX_AHEAD = 1024
"""Rounds that a peer may open before this rank's own call: bounds what it can make us
hold. A peer is ahead by one step at most, so by the buckets of a step."""


class MeshEndpoint(MeshMember):
    """One rank of a mesh. See the module's docstring."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        session: int,
        bound: LossBound,
        *,
        now: float,
        timeout_s: float,
        silence_s: float,
        first_counter: int = 1,
    ) -> None:
        super().__init__(
            rank,
            world_size,
            session,
            bound,
            now=now,
            timeout_s=timeout_s,
            silence_s=silence_s,
        )
        self._first_counter = first_counter
        self.plan: MeshPlan | None = None
        """None before the start."""
        self._next_index = 0
        """Of this rank's next call."""
        self._rounds: dict[int, MeshRound] = {}
        """The open ones, by index."""
        self._shapes: dict[int, tuple[str, int]] = {}
        """Dtype and elements of the bucket that had this slot last."""
        self._slot = 0
        self.ledger = StepLedger(bound)
        self._held: dict[int, tuple[MeshRound, RoundSum]] = {}
        """Rounds that are over and end with their step, by index."""
        self._active: dict[int, list[tuple[Sender, BucketBytes]]] = {
            peer: [] for peer in range(world_size)
        }
        self._touched: dict[int, tuple[int, Receiver]] = {}
        self._mean_due_s: float | None = None

    # -- down ---------------------------------------------------------------------

    def all_reduce(
        self,
        values_N: NDArray[Any],
        weight: float,
        now: float,
        *,
        dtype: str,
        step: int,
        is_last: bool,
        ends_L: tuple[int, ...] = (),
        learning_rate: float | None = None,
        loss_scale: float = 1.0,
        computed: float = 1.0,
        planned: int = 1,
    ) -> int:
        """Start the next round; its end is a Reduced event.

        Args:
            values_N: the gradient, already multiplied by the weight, contiguous, in
                the wire dtype. This rank's until the round ends; then it holds the
                mean.
            weight: what is behind it, 0 or 1e-30 to 1e30; with 0 nothing is sent.
            now: seconds, monotonic.
            dtype: name of the wire format.
            step: of the job; does not fall from call to call.
            is_last: the step's last round: the next bound is decided after it.
            ends_L: where each tensor ends, for ``per_layer``; empty: one norm.
            learning_rate: for the detector's ``lr_rule``.
            loss_scale: factor that the gradient carries, 1e-30 to 1e30.
            computed: micro-batches behind the gradient, 0 to ``planned``.
            planned: micro-batches that were to be behind it, at most 1e9.

        Returns:
            The round's counter.

        Raises:
            ConfigError: not started, or a number is out of range.
        """
        if self.plan is None or dtype not in FORMATS:
            raise ConfigError(f"an all-reduce of {dtype}, or before the start")
        wire = FORMATS[dtype].wire
        if values_N.dtype != wire or values_N.ndim != 1 or not len(values_N):
            raise ConfigError(
                f"a {dtype} bucket is one or more flat {wire} elements, not "
                f"{values_N.shape} of {values_N.dtype}"
            )
        index = self._next_index
        begin = ShardBegin(
            self._counter(index),
            self._slot,
            step,
            is_last,
            dtype,
            len(values_N),
            max(1, len(ends_L)),
            weight,
            learning_rate,
            loss_scale,
            computed,
            planned,
        )
        check_begin(begin)
        self._is_touched = True
        round_ = self._open(self.rank, index, begin)
        self._next_index += 1
        self._slot = 0 if is_last else self._slot + 1
        round_.start(values_N, begin, ends_L, now)
        for peer, sender in round_.ways_in.items():
            self._active[peer].append((sender, round_.rows(round_.key, peer)))
        for link in self.links.values():
            link.control.append(begin)
        self._check_all_stay()
        return begin.counter

    def settle(self, now: float) -> None:
        """See Endpoint."""
        if self.error is not None or not self._is_touched:
            return
        self._is_touched = False
        self._try_start(now)
        touched, self._touched = self._touched, {}
        for link, receiver in touched.values():
            receiver.settle(now)
            self._collect(link, receiver)
        for senders in self._active.values():
            if any(sender.state is SenderState.STOPPED for sender, _ in senders):
                senders[:] = [
                    pair for pair in senders if pair[0].state is not SenderState.STOPPED
                ]
        for round_ in list(self._rounds.values()):
            if self._mean_due_s is None and round_.is_all_in:
                # For the next turn: the stops must leave before the division.
                self._mean_due_s = math.nextafter(now, math.inf)
            if round_.is_complete:
                self._close_round(round_, now)

    def timer(self) -> float | None:
        """See Endpoint."""
        if self.error is not None:
            return None
        times = self._meeting_timers()
        if self._mean_due_s is not None:
            times.append(self._mean_due_s)
        times += (round_.timer() for round_ in self._rounds.values())
        due_s = min(times, default=math.inf)
        return None if due_s == math.inf else due_s

    def handle_timer(self, now: float) -> None:
        """See Endpoint."""
        if self.error is not None:
            return
        error = self._handle_meeting_timer(now)
        self._take_means(now)
        for round_ in self._rounds.values():
            error = error or round_.handle_timer(now)
            self._touch(round_)  # a gradient's deadline may have passed
        if error is not None:
            self.fail(error)

    # -- rounds -------------------------------------------------------------------

    def _begin_rounds(self, room_bytes: int, limits: Limits) -> None:
        self.plan = MeshPlan(self.rank, self.world_size, self.bound, room_bytes, limits)

    def _awaited_in_rounds(self) -> Iterator[int]:
        for round_ in self._rounds.values():
            if round_.values_N is not None:
                yield from set(range(self.world_size)) - set(round_.begins)

    def _counter(self, index: int) -> int:
        return (self._first_counter + index) % COUNTER_PERIOD

    def _index(self, counter: int) -> int:
        """Which round has this counter, of those around this rank's next one."""
        ahead = (counter - self._counter(self._next_index)) % COUNTER_PERIOD
        if ahead >= COUNTER_PERIOD // 2:
            ahead -= COUNTER_PERIOD
        return self._next_index + ahead

    def _open(self, rank: int, index: int, begin: ShardBegin) -> MeshRound:
        """The round that a rank announced, and what that says of its bound.

        Raises:
            HandshakeError: another rank announced it otherwise.
            PeerProtocolError: the same rank announced it before.
        """
        round_ = self._rounds.get(index)
        shape = (begin.dtype, begin.num_elements)
        if round_ is not None and not round_.begins and round_.shape != shape:
            round_ = None  # what was guessed from the step before was wrong
        if round_ is None:
            assert self.plan is not None  # nothing is announced before the start
            round_ = MeshRound(self.plan, index, begin.counter, begin.bucket, *shape)
            self._rounds[index] = round_
        self._shapes[begin.bucket] = shape
        if rank in round_.begins:
            raise PeerProtocolError(
                peer_name(rank), f"in {round_.key.describe()}", "ShardBegin twice"
            )
        for other, before in round_.begins.items():
            two = [(other, before), (rank, begin)]
            two.sort(key=lambda one: one[0] != self.rank)  # ours is the first
            compare_begins(*two[0], *two[1])
        round_.begins[rank] = begin
        self._touch(round_)  # what came before any announcement may be enough
        self._bound_round(round_)
        return round_

    def _bound_round(self, round_: MeshRound) -> None:
        """Give a round its loss bound, if it is announced and decided."""
        if round_.p is not None or not round_.begins:
            return
        step = next(iter(round_.begins.values())).step
        p = self.ledger.bound_of(step)
        if p is not None:
            round_.set_bound(p, self.ledger.critical)
            self._touch(round_)

    def _touch(self, round_: MeshRound) -> None:
        """Look at a round's gradients again when settling."""
        self._is_touched = True
        if not round_.begins:
            return  # see _receiver
        for peer, receiver in round_.arrivals.items():
            self._touched[id(receiver)] = self._by_rank[peer], receiver

    def _take_means(self, now: float) -> None:
        if self._mean_due_s is None or now < self._mean_due_s:
            return
        self._mean_due_s = None
        self._is_touched = True
        for round_ in self._rounds.values():
            if round_.is_all_in:
                mean = round_.take_mean(now)
                for peer, sender in round_.ways_back.items():
                    rows = round_.rows(round_.back_key, peer)
                    self._active[peer].append((sender, rows))
                for link in self.links.values():
                    link.control.append(mean)

    def _close_round(self, round_: MeshRound, now: float) -> None:
        """A round is over here; with the step's last one the next bound is decided."""
        del self._rounds[round_.index]
        part = round_.sum_up()
        self._held[round_.index] = round_, part
        decision = self.ledger.add(part)
        if not part.is_last:
            self._report(round_.index, None)
        if decision is None:
            return
        (last,) = self._held  # all others of the step were reported
        self._report(last, decision)
        for other in self._rounds.values():
            self._bound_round(other)

    def _report(self, index: int, decision: Decision | None) -> None:
        round_, part = self._held.pop(index)
        begins = round_.begins.values()
        self._events.append(
            Reduced(
                round_.key.counter,
                round_.key.bucket,
                round_.total_weight or 0.0,
                round_.p or 0.0,
                round_.critical,
                self.ledger.norm_of(part),
                None if decision is None else decision.ratio,
                "no check" if decision is None else decision.verdict,
                describe_round(round_),
                sum(begin.computed for begin in begins),
                sum(begin.planned for begin in begins),
            )
        )

    # -- what the links ask ---------------------------------------------------------

    def _senders(self, link: int) -> Sequence[tuple[Sender, BucketBytes]]:
        return self._active.get(self.links[link].peer_rank, ())

    def _find_round(
        self, link: int, kind: int, bucket: int, counter: int
    ) -> RoundKey | None:
        if self.plan is None:
            return None
        index = self._index(counter)
        round_ = self._rounds.get(index)
        if round_ is None:
            shape = self._shapes.get(bucket)
            is_ahead = 0 <= index - self._next_index < MAX_AHEAD
            if not is_ahead or shape is None or kind != Direction.IN:
                return None
            round_ = MeshRound(self.plan, index, counter, bucket, *shape)
            self._rounds[index] = round_
        if bucket != round_.key.bucket or not round_.expects(
            kind, self.links[link].peer_rank
        ):
            return None
        return round_.key if kind == Direction.IN else round_.back_key

    def _layout(self, link: int, key: RoundKey) -> ChunkLayout:
        round_ = self._rounds[self._index(key.counter)]
        return round_.layout(key, self.links[link].peer_rank)

    def _receiver(
        self, link: int, key: RoundKey, now: float
    ) -> tuple[Receiver, WireFormat]:
        round_ = self._rounds[self._index(key.counter)]
        receiver = round_.receiver(key, self.links[link].peer_rank, now)
        if round_.begins:
            # Before, its shape is a guess, of which no sender may be told that it is
            # complete: FIELD S07.
            self._touched[id(receiver)] = link, receiver
        return receiver, round_.format

    def _handle_round(self, link: int, message: Message, now: float) -> None:
        peer = self.links[link].peer_rank
        if isinstance(message, ShardBegin):
            self._take_begin(peer, message)
        elif isinstance(message, ShardMean):
            self._take_told_mean(peer, message)
        else:
            kind = type(message).__name__
            raise PeerProtocolError(peer_name(peer), self._phase(), kind)

    def _take_begin(self, rank: int, begin: ShardBegin) -> None:
        """A peer announced its gradient.

        Raises:
            WireError: a number is out of range.
        """
        index = self._index(begin.counter)
        check_begin_untrusted(begin)
        if index not in self._rounds and not 0 <= index - self._next_index < MAX_AHEAD:
            raise WireError(f"round {begin.counter} after {self._next_index} rounds")
        self._open(rank, index, begin)

    def _take_told_mean(self, rank: int, mean: ShardMean) -> None:
        """A peer announced the mean of its shard.

        Raises:
            WireError: there is no such round here, or a number is out of range.
        """
        round_ = self._rounds.get(self._index(mean.counter))
        if round_ is None or not round_.take_told(rank, mean):
            raise WireError(f"a mean that nobody waits for, of round {mean.counter}")

    def _phase(self) -> str:
        if self.plan is None:
            return "start-up"
        for round_ in self._rounds.values():
            if round_.values_N is not None:
                return round_.key.describe()
        return f"the pause after round {self._next_index}"

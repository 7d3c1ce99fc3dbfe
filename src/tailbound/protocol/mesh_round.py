"""One rank's part of one all-reduce in a mesh: gradient out within p, means in exact.

Every rank owns a shard of the bucket. It sends the other shards' gradients to their
owners and takes in its own, lossy within p; reduces; and sends the mean of its shard to
all, exact. Both ways run on every link at once, by the machines of the server plan.

With ``p_back`` a mean may be lost in part, too. Its owner keeps for every peer what
that has not got, and adds it to the next mean that it sends there (docs/design/0033).

Source: DESIGN, 2 and 3; spec N4 to N7.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import RoundTimeoutError, TailboundError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey, peer_name
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.ledger import RoundSum, sum_round
from tailbound.protocol.mesh_plan import MeshPlan
from tailbound.protocol.messages import ShardBegin, ShardMean
from tailbound.protocol.receiver import Receiver, ReceiverState
from tailbound.protocol.sender import Sender, SenderState
from tailbound.protocol.shard_sum import ShardSum
from tailbound.protocol.sinks import StoreSink
from tailbound.reduction import FORMATS, l2_norm, widen
from tailbound.residual import Residual, Residuals


class MeshRound:
    """One round, from its first sign until this rank is done with it."""

    def __init__(
        self,
        plan: MeshPlan,
        index: int,
        counter: int,
        slot: int,
        dtype: str,
        num_elements: int,
    ) -> None:
        self.plan, self.index = plan, index
        self.dtype, self.num_elements = dtype, num_elements
        self.key = RoundKey(counter, slot, Direction.IN)
        self.back_key = RoundKey(counter, slot, Direction.BACK)
        self.format = FORMATS[dtype]
        self.shards = plan.cut(num_elements, self.format.wire.itemsize, slot)
        own = self.shards[plan.rank]
        self._sum = None if own is None else ShardSum(own, self.format)
        self.begins: dict[int, ShardBegin] = {}
        self.arrivals: dict[int, Receiver] = {}
        """Gradients of my shard, by the rank they come from."""
        self.backs: dict[int, Receiver] = {}
        """Means of the other shards, by their owners."""
        self.means: dict[int, ShardMean] = {}
        self.ways_in: dict[int, Sender] = {}
        """My gradient to each owner."""
        self.ways_back: dict[int, Sender] = {}
        """My shard's mean to each rank."""
        self._residuals: dict[int, Residual] = {}
        """Of what I send to each owner, myself included."""
        self._owed: dict[int, tuple[Residual, NDArray[Any]]] = {}
        """With ``p_back``, by peer: what my means owe it, and what it is sent."""
        self.values_N: NDArray[Any] | None = None
        self.p: float | None = None
        """Loss bound; None while it is not decided yet."""
        self.critical = True
        self._ends_L: tuple[int, ...] = ()
        self.started_s = self.back_s = math.inf
        """When this rank began; when the first sign of a mean came."""

    @property
    def shape(self) -> tuple[str, int]:
        """Dtype and elements of the bucket."""
        return self.dtype, self.num_elements

    # -- in ---------------------------------------------------------------------

    def layout(self, key: RoundKey, peer: int) -> ChunkLayout:
        """How what a peer sends under this key is cut."""
        owner = self.plan.rank if key.direction is Direction.IN else peer
        shard = self.shards[owner]
        assert shard is not None  # the round has a receiver for it
        return shard.layout

    def receiver(self, key: RoundKey, peer: int, now: float) -> Receiver:
        """What takes in what a peer sends under this key."""
        if key.direction is Direction.BACK:
            self.back_s = min(self.back_s, now)
            return self.backs[peer]
        arrival = self.arrivals.get(peer)
        if arrival is None:
            assert self._sum is not None  # ``expects`` said so
            layout = self.layout(key, peer)
            arrival = self.plan.make_receiver(key, layout, self._sum.sink, peer, now)
            self.arrivals[peer] = arrival
            self._bound_arrival(peer, arrival)
        return arrival

    def expects(self, direction: int, peer: int) -> bool:
        """True if this peer may send data of this direction now."""
        if direction == Direction.IN:
            begin = self.begins.get(peer)
            return self._sum is not None and (begin is None or begin.weight > 0)
        return direction == Direction.BACK and peer in self.backs

    def set_bound(self, p: float, critical: bool) -> None:
        """The step's loss bound is decided."""
        self.p, self.critical = p, critical
        for peer, arrival in self.arrivals.items():
            self._bound_arrival(peer, arrival)

    def start(
        self,
        values_N: NDArray[Any],
        begin: ShardBegin,
        ends_L: tuple[int, ...],
        now: float,
    ) -> None:
        """This rank's gradient is there; its senders may start."""
        plan = self.plan
        self.values_N, self.started_s = values_N, now
        self.begins[plan.rank] = begin
        self._ends_L = ends_L
        if plan.residuals is not None and begin.weight > 0:
            self._add_lost(plan.residuals, values_N, begin.loss_scale)
        if self._sum is not None:
            self._sum.put_own(values_N, begin.weight)
            for arrival in self.arrivals.values():
                arrival.redirect(self._sum.sink)
        for turn in range(1, plan.world_size):
            # From the next rank on, so that not all send to the same one at once.
            owner = (plan.rank + turn) % plan.world_size
            shard = self.shards[owner]
            if shard is None:
                continue
            part_E = values_N[shard.first : shard.stop]
            self.backs[owner] = plan.make_receiver(
                self.back_key, shard.layout, self._sink(owner), owner, now
            )
            if begin.weight > 0:
                order_C = plan.send_order(self.key, part_E, shard.layout, self.format)
                self.ways_in[owner] = plan.make_sender(
                    self.key, shard.layout, order_C, owner, now
                )

    def rows(self, key: RoundKey, peer: int) -> BucketBytes:
        """The data of my sender to this peer."""
        is_back = key.direction is Direction.BACK
        shard = self.shards[self.plan.rank if is_back else peer]
        assert shard is not None  # there is a sender
        if is_back and peer in self._owed:
            _, sent_E = self._owed[peer]
            return BucketBytes(sent_E, shard.layout)
        assert self.values_N is not None  # it was started
        return BucketBytes(self.values_N[shard.first : shard.stop], shard.layout)

    # -- the mean ---------------------------------------------------------------

    @property
    def total_weight(self) -> float | None:
        """Weight of all ranks; None while one has not begun."""
        if len(self.begins) < self.plan.world_size or self.values_N is None:
            return None
        return sum(self.begins[rank].weight for rank in range(self.plan.world_size))

    @property
    def is_all_in(self) -> bool:
        """Every gradient of my shard is in within the bound; its mean is not taken."""
        if self._sum is None or self.plan.rank in self.means or not self.total_weight:
            return False
        return all(
            begin.weight == 0
            or rank == self.plan.rank
            or (
                (arrival := self.arrivals.get(rank)) is not None
                and arrival.state is ReceiverState.CLOSED
            )
            for rank, begin in self.begins.items()
        )

    def take_mean(self, now: float) -> ShardMean:
        """Take the mean of my shard and open its way back; returns what to announce."""
        plan = self.plan
        total = self.total_weight
        assert total  # all is in
        assert self._sum is not None
        shard = self.shards[plan.rank]
        assert shard is not None
        weight_C = None
        if plan.bound.holes == "received_mean":
            weight_C = np.full(shard.layout.num_chunks, self.begins[plan.rank].weight)
            for rank, arrival in self.arrivals.items():
                weight_C += self.begins[rank].weight * arrival.arrived_C
        mean_E = self._sum.finish(total, weight_C)
        arrivals = [
            arrival
            for rank, arrival in self.arrivals.items()
            if self.begins[rank].weight > 0
        ]
        num = len(arrivals) + (self.begins[plan.rank].weight > 0)
        mean = ShardMean(
            self.key.counter,
            self.key.bucket,
            self._squares(mean_E, shard.first),
            num * shard.layout.num_chunks,
            sum(arrival.missing for arrival in arrivals),
        )
        self.means[plan.rank] = mean
        for turn in range(1, plan.world_size):
            peer = (plan.rank + turn) % plan.world_size
            if plan.owed is not None:
                self._add_owed(plan.owed, peer, mean_E, shard.layout)
            order_C = plan.back_order(self.back_key, shard.layout, peer)
            self.ways_back[peer] = plan.make_sender(
                self.back_key, shard.layout, order_C, peer, now
            )
        return mean

    def take_told(self, rank: int, mean: ShardMean) -> bool:
        """An owner announced the mean of its shard; False if it cannot be that."""
        if (
            rank not in self.backs
            or rank in self.means
            or mean.bucket != self.key.bucket
            or len(mean.squares) != self.begins[self.plan.rank].num_norms
            or not 0 <= mean.missing <= mean.num_chunks
            or any(square < 0 for square in mean.squares)
        ):
            return False
        self.means[rank] = mean
        return True

    @property
    def is_complete(self) -> bool:
        """This rank has the whole mean, and every peer what it needs of this rank."""
        total = self.total_weight
        if (
            total is None
            or self.p is None
            or any(
                sender.state is not SenderState.STOPPED
                for senders in (self.ways_in, self.ways_back)
                for sender in senders.values()
            )
        ):
            return False
        if total == 0:
            return True
        owners = sum(shard is not None for shard in self.shards)
        return len(self.means) == owners and all(
            back.state is ReceiverState.CLOSED for back in self.backs.values()
        )

    def sum_up(self) -> RoundSum:
        """What this round adds to its step; what it lost is kept for the next."""
        for owner, back in self.backs.items():
            if owner in self.means and back.missing:
                # There stands this rank's own gradient.
                self._sink(owner).clear(~back.arrived_C)
        for owner, residual in self._residuals.items():
            way_in = self.ways_in.get(owner)
            residual.note(None if way_in is None else way_in.arrived_C)
        for peer, (owed, _) in self._owed.items():
            owed.note(self.ways_back[peer].arrived_C)
        means = [self.means[rank] for rank in sorted(self.means)]
        return sum_round(self.index, self.begins[0], means)

    # -- time and records ---------------------------------------------------------

    def timer(self) -> float:
        """When ``handle_timer``, a sender or a gradient has something to do."""
        machines: list[Sender | Receiver] = [*self._senders(), *self.arrivals.values()]
        times = (machine.timer() for machine in machines)
        timeout_s = self.started_s + self.plan.limits.timeout_s
        return min([timeout_s, *(time for time in times if time is not None)])

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the job, if the deadline has passed."""
        for sender in self._senders():
            sender.handle_timer(now)
        waited_s = now - self.started_s
        if waited_s < self.plan.limits.timeout_s:
            return None
        late, num, missing = self._late()
        names = ", ".join(peer_name(rank) for rank in late)
        return RoundTimeoutError(names, self.key.describe(), missing, num, waited_s)

    # -- inside -------------------------------------------------------------------

    def _add_lost(
        self, residuals: Residuals, values_N: NDArray[Any], loss_scale: float
    ) -> None:
        """Add what this rank still owes each owner.

        It loses nothing to itself, but its own shard has the senders' momentum too.
        """
        for owner, shard in enumerate(self.shards):
            is_own = owner == self.plan.rank
            if shard is None or (is_own and not self.plan.bound.residual_momentum):
                continue
            residual = residuals.of(
                (self.key.bucket, owner),
                shard.layout.num_elements,
                shard.layout.elements_per_chunk,
                self.format,
            )
            part_E = values_N[shard.first : shard.stop]
            residual.apply(part_E, loss_scale=loss_scale)
            self._residuals[owner] = residual

    def _add_owed(
        self, owed: Residuals, peer: int, mean_E: NDArray[Any], layout: ChunkLayout
    ) -> None:
        """Make what a peer is sent: the mean, and what it missed of earlier ones."""
        residual = owed.of(
            (self.key.bucket, peer),
            layout.num_elements,
            layout.elements_per_chunk,
            self.format,
        )
        sent_E = mean_E.copy()
        loss_scale = self.begins[self.plan.rank].loss_scale
        residual.apply(sent_E, loss_scale=loss_scale)
        self._owed[peer] = residual, sent_E

    def _sink(self, owner: int) -> StoreSink:
        """Where the mean of another rank's shard goes."""
        shard = self.shards[owner]
        assert shard is not None  # it sends a mean
        assert self.values_N is not None  # the round was started
        return StoreSink(self.values_N[shard.first : shard.stop], shard.layout)

    def _bound_arrival(self, peer: int, arrival: Receiver) -> None:
        if self.p is not None:  # without a bound nothing may be missing
            num_chunks = arrival.layout.num_chunks
            deadlines = self.plan.deadlines
            deadline = deadlines.of(self.key.bucket, peer, self.p, num_chunks)
            arrival.set_bound(self.p, deadline)

    def _senders(self) -> Iterator[Sender]:
        yield from self.ways_in.values()
        yield from self.ways_back.values()

    def _late(self) -> tuple[list[int], int, int]:
        """Who keeps the round open, with the chunks of it and those missing."""
        ranks = range(self.plan.world_size)
        absent = [rank for rank in ranks if rank not in self.begins]
        if absent:
            num = ChunkLayout(
                self.num_elements, self.format.wire.itemsize, self.plan.room_bytes
            ).num_chunks
            return absent, num, num
        for receivers in (self.arrivals, self.backs):
            still_open = {
                rank: receiver
                for rank, receiver in receivers.items()
                if receiver.state is ReceiverState.OPEN
                and (receivers is self.backs or self.begins[rank].weight > 0)
            }
            if still_open:
                return (
                    list(still_open),
                    sum(r.layout.num_chunks for r in still_open.values()),
                    sum(r.missing for r in still_open.values()),
                )
        waiting = [
            rank
            for senders in (self.ways_in, self.ways_back)
            for rank, sender in senders.items()
            if sender.state is not SenderState.STOPPED
        ]
        silent = [rank for rank in ranks if rank not in self.means]
        return waiting or silent, 0, 0

    def _squares(self, mean_E: NDArray[Any], first: int) -> tuple[float, ...]:
        """Sum of squares within my shard, of each tensor that is told apart."""
        wide_E = widen(mean_E, self.format)
        if not self._ends_L:
            return (l2_norm(wide_E) ** 2,)
        cuts_L = np.clip(np.array([0, *self._ends_L]) - first, 0, len(mean_E))
        return tuple(
            l2_norm(wide_E[start:stop]) ** 2
            for start, stop in itertools.pairwise(cuts_L.tolist())
        )

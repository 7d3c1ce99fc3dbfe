"""Sender and receiver in any order of inputs, each against a model made of sets."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tailbound.errors import PeerProtocolError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.deadline import FixedDeadline
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import Bitmap, Mark, MarkSeen, Probe, Stop
from tailbound.protocol.receiver import Receiver, ReceiverState
from tailbound.protocol.sender import Sender, SenderState
from tailbound.protocol.sinks import SumSink
from tailbound.reduction import FORMATS

NAMES = (2**32 - 1, 3, Direction.IN)
KEY = RoundKey(*NAMES)
WINDOW_BYTES = 65_507
"""The smallest; 31 of the datagrams below."""

pytestmark = pytest.mark.slow

layouts = st.builds(
    ChunkLayout, st.integers(1, 30_000), st.just(4), st.integers(2000, 2100)
)
"""Up to 60 chunks of about 2 kB, with and without a short last one."""


def bits_of(arrived: set[int], num_chunks: int) -> bytes:
    """The bitmap, made from the text of a binary number."""
    text = "".join("1" if chunk in arrived else "0" for chunk in range(num_chunks))
    text += "0" * (-num_chunks % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big")


class SenderMachine(RuleBasedStateMachine):
    """A sender, a receiver that is a set, and a link that loses what it likes."""

    @initialize(layout=layouts, data=st.data())
    def open(self, layout: ChunkLayout, data: st.DataObject) -> None:
        num = layout.num_chunks
        order = list(range(num))
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(order))
        self.layout, self.num = layout, num
        self.now = 0.0
        self.sender = Sender(
            KEY,
            layout,
            np.array(order),
            peer="the server",
            now=0.0,
            window_bytes=WINDOW_BYTES,
            timeout_s=1e9,
            silence_s=1e9,
        )
        self.order = order
        self.due = order[:]
        self.arrived: set[int] = set()
        self.state = SenderState.SENDING
        self.sends, self.probes, self.sent, self.repaired = 1, 0, 0, 0
        self.marks: list[int] = []
        self.is_early = False
        self.final: set[int] | None = None

    @rule(max_chunks=st.integers(1, 64), data=st.data())
    def send(self, max_chunks: int, data: st.DataObject) -> None:
        self.now += 1.0  # longer than any pause between repairs
        had_chunks = self.sender.has_chunks(self.now)
        batch_K = self.sender.next_chunks(self.now, max_chunks, 65_535)
        assert had_chunks is (batch_K is not None)
        if batch_K is None:
            room = self.sender.window.room_bytes
            assert self.state is not SenderState.SENDING or (
                room < self.layout.segment_bytes
            )
            return
        batch = batch_K.tolist()
        assert 1 <= len(batch) <= max_chunks
        assert batch == self.due[: len(batch)]
        if self.layout.tail_bytes:
            assert self.layout.num_full not in batch[:-1]
        self.due = self.due[len(batch) :]
        self.sent += len(batch)
        if self.sends > 1:
            self.repaired += len(batch)
        self.arrived |= {chunk for chunk in batch if data.draw(st.booleans())}
        control = self.sender.next_control()
        if not self.due:
            assert control == Probe(*NAMES)
            self.probes += 1
            self.state = SenderState.WAITING
        elif control is not None:
            assert isinstance(control, Mark)
            self.marks.append(control.sent_bytes)
        assert self.sender.next_control() is None

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def see_mark(self, data: st.DataObject) -> None:
        mark = data.draw(st.sampled_from(self.marks))
        self.sender.receive_untrusted(MarkSeen(*NAMES, mark), self.now)
        assert self.sender.window.seen_bytes >= mark

    @rule()
    def answer_with_the_bitmap(self) -> None:
        bitmap = Bitmap(*NAMES, bits_of(self.arrived, self.num))
        is_complete = len(self.arrived) == self.num
        if self.state is not SenderState.WAITING or is_complete:
            with pytest.raises(PeerProtocolError):
                self.sender.receive_untrusted(bitmap, self.now)
            return
        self.sender.receive_untrusted(bitmap, self.now)
        self.state = SenderState.SENDING
        self.sends += 1
        self.due = [chunk for chunk in self.order if chunk not in self.arrived]
        assert self.sender.window.in_flight_bytes == 0

    @precondition(lambda self: self.arrived)
    @rule()
    def stop(self) -> None:
        stop = Stop(*NAMES, bits_of(self.arrived, self.num))
        if self.state is SenderState.STOPPED:
            with pytest.raises(PeerProtocolError):
                self.sender.receive_untrusted(stop, self.now)
            return
        self.sender.receive_untrusted(stop, self.now)
        self.is_early = self.state is SenderState.SENDING
        self.state = SenderState.STOPPED
        self.final = set(self.arrived)

    @rule()
    def let_time_pass(self) -> None:
        self.now += 1.0
        assert self.sender.handle_timer(self.now) is None

    @invariant()
    def agrees_with_the_model(self) -> None:
        statistics = self.sender.statistics()
        assert self.sender.state is self.state
        assert statistics.sends == self.sends
        assert statistics.probes == self.probes
        assert statistics.sent == self.sent
        assert statistics.retransmitted == self.repaired
        assert statistics.early_stop is self.is_early
        missing = 0 if self.final is None else self.num - len(self.final)
        assert statistics.missing == missing

    @invariant()
    def never_has_more_than_the_window_on_the_way(self) -> None:
        assert 0 <= self.sender.window.in_flight_bytes <= WINDOW_BYTES

    @invariant()
    def has_a_timer_until_it_is_stopped(self) -> None:
        is_stopped = self.state is SenderState.STOPPED
        assert (self.sender.timer() is None) is is_stopped

    @invariant()
    def marks_ascend(self) -> None:
        assert all(first < second for first, second in pairwise(self.marks))


class ReceiverMachine(RuleBasedStateMachine):
    """A receiver, and which delivery of each chunk came first."""

    @initialize(
        num_elements=st.integers(1, 40),
        per_chunk=st.integers(1, 4),
        loss_bound=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.99]),
        limit_s=st.sampled_from([math.inf, 0.0, 30.0, 100.0]),
    )
    def open(
        self, num_elements: int, per_chunk: int, loss_bound: float, limit_s: float
    ) -> None:
        layout = ChunkLayout(num_elements, 4, 4 * per_chunk)
        self.layout, self.num, self.per_chunk = layout, layout.num_chunks, per_chunk
        self.allowed = min(int(loss_bound * 1000) * self.num // 1000, self.num - 1)
        self.sum_N = np.zeros(num_elements, np.float32)
        self.receiver = Receiver(
            KEY,
            layout,
            SumSink(self.sum_N, layout, FORMATS["float32"]),
            loss_bound=loss_bound,
            peer="rank 1",
            now=0.0,
            timeout_s=1e9,
            deadline=FixedDeadline(limit_s),
        )
        self.now, self.limit_s, self.looked_s = 0, limit_s, math.inf
        self.first: dict[int, int] = {}
        self.given, self.received, self.duplicates, self.probes = 0, 0, 0, 0
        self.is_closed = False

    def note(self, chunk: int) -> int:
        """A number of its own for each datagram; tells the model that it came."""
        self.given += 1
        self.received += 1
        if self.is_closed or chunk in self.first:
            self.duplicates += 1
        else:
            self.first[chunk] = self.given
        return self.given

    @precondition(lambda self: self.layout.num_full)
    @rule(data=st.data())
    def receive_scattered(self, data: st.DataObject) -> None:
        numbers = st.integers(0, self.layout.num_full - 1)
        chunks = data.draw(st.lists(numbers, min_size=1, max_size=12))
        values = [self.note(chunk) for chunk in chunks]
        rows_KE = np.repeat(np.array(values, np.float32)[:, None], self.per_chunk, 1)
        self.receiver.receive(np.array(chunks), rows_KE)

    @precondition(lambda self: self.layout.num_full)
    @rule(data=st.data())
    def receive_run(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, self.layout.num_full - 1))
        end = data.draw(st.integers(first + 1, self.layout.num_full))
        values = [self.note(chunk) for chunk in range(first, end)]
        rows_KE = np.repeat(np.array(values, np.float32)[:, None], self.per_chunk, 1)
        self.receiver.receive_run(first, rows_KE)

    @precondition(lambda self: self.layout.tail_bytes)
    @rule(num=st.integers(1, 3))
    def receive_tail(self, num: int) -> None:
        value = self.note(self.num - 1)
        for _ in range(num - 1):
            self.note(self.num - 1)
        row_E = np.full(self.layout.tail_bytes // 4, value, np.float32)
        self.receiver.receive_tail(num, row_E)

    @rule()
    def probe(self) -> None:
        self.receiver.receive_probe()
        if self.is_closed:
            assert self.receiver.next_control() is None
            return
        self.probes += 1
        bits = bits_of(set(self.first), self.num)
        assert self.receiver.next_control() == Bitmap(*NAMES, bits, self.allowed)

    @rule(sent_bytes=st.integers(0, 10**6))
    def mark(self, sent_bytes: int) -> None:
        self.receiver.receive_mark_untrusted(sent_bytes)
        seen = self.receiver.next_control()
        if self.is_closed:
            assert seen is None
        else:
            assert isinstance(seen, MarkSeen)
            assert seen.sent_bytes >= sent_bytes

    @rule(later=st.integers(0, 40))
    def settle(self, later: int) -> None:
        self.now += later
        self.looked_s = min(self.looked_s, self.now)
        is_enough = self.num - len(self.first) <= self.allowed
        is_time = self.now >= self.looked_s + self.limit_s and bool(self.first)
        closes = not self.is_closed and (is_enough or is_time)
        assert self.receiver.settle(float(self.now)) is closes
        if closes:
            self.is_closed = True
            bits = bits_of(set(self.first), self.num)
            assert self.receiver.next_control() == Stop(*NAMES, bits)

    @invariant()
    def agrees_with_the_model(self) -> None:
        statistics = self.receiver.statistics()
        is_closed = self.receiver.state is ReceiverState.CLOSED
        assert is_closed is self.is_closed
        assert statistics.received == self.received
        assert statistics.duplicates == self.duplicates
        assert statistics.probes == self.probes
        assert statistics.missing == self.num - len(self.first)
        assert set(np.flatnonzero(self.receiver.arrived_C).tolist()) == set(self.first)

    @invariant()
    def holds_the_first_delivery_of_each_chunk_once(self) -> None:
        expected = [
            self.first.get(element // self.per_chunk, 0)
            for element in range(len(self.sum_N))
        ]
        assert self.sum_N.tolist() == expected

    @invariant()
    def says_nothing_unasked_within_a_small_window(self) -> None:
        assert self.receiver.next_control() is None


TestSender = SenderMachine.TestCase
TestSender.settings = settings(max_examples=30, stateful_step_count=30)
TestReceiver = ReceiverMachine.TestCase
TestReceiver.settings = settings(max_examples=40, stateful_step_count=30)

"""Clocks that tests move, for what computes."""

from dataclasses import dataclass, field

from tailbound.training.clocks import ComputeClock, CpuClock, Event


@dataclass
class HandClock:
    """Seconds that the test sets; give ``read`` to a CpuClock."""

    now_s: float = 100.0

    def read(self) -> float:
        """The time now."""
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def clock(self) -> ComputeClock:
        """A compute clock that reads this one."""
        return CpuClock(self.read)


@dataclass
class FakeDevice:
    """A device that works off a queue, one piece after the other, on a hand clock."""

    host: HandClock = field(default_factory=HandClock)
    free_s: float = 0.0
    """When the last piece queued so far is done."""

    def queue(self, seconds: float) -> None:
        """Queue a piece of work; returns at once."""
        self.free_s = max(self.free_s, self.host.now_s) + seconds

    def make_event(self) -> Event:
        """An event of this device."""
        return FakeEvent(self)


@dataclass
class FakeEvent:
    """What torch.cuda.Event does, on a FakeDevice."""

    device: FakeDevice
    passed_s: float = 0.0

    def record(self) -> None:
        """See Event."""
        self.passed_s = max(self.device.free_s, self.device.host.now_s)

    def query(self) -> bool:
        """See Event."""
        return self.device.host.now_s >= self.passed_s

    def elapsed_time(self, end: Event, /) -> float:
        """See Event."""
        assert isinstance(end, FakeEvent)
        assert self.query()
        assert end.query()
        return 1e3 * (end.passed_s - self.passed_s)

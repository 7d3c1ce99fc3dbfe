"""Recording a trace: what counts as compute, on clocks that the tests move."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailbound.compute.traces import read_trace
from tailbound.errors import ConfigError
from tailbound.training.clocks import EventClock
from tailbound.training.record import LatencyRecorder, record_latencies
from training.fakes import FakeDevice, HandClock

HEADER = "step,worker,micro_batch,seconds\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


def recorder_on(
    hand: HandClock, path: Path, model: nn.Module | None = None, warmup_steps: int = 0
) -> LatencyRecorder:
    return record_latencies(
        path, model=model, warmup_steps=warmup_steps, clock=hand.clock()
    )


def loading(hand: HandClock, *load_s: float) -> Iterator[float]:
    """Micro-batches that take time to load."""
    for seconds in load_s:
        hand.pass_s(seconds)
        yield seconds


def test_each_micro_batch_is_a_row_with_its_loading(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "deeper" / "t.csv") as recorder:
        hand.pass_s(7.0)  # before the step
        for load_s in recorder.micro_batches(loading(hand, 0.5, 0.25)):
            hand.pass_s(2.0 * load_s)
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,1.5\n0,0,1,0.75\n"


def test_what_is_after_a_step_s_end_is_not_counted(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        for _ in range(2):
            for _ in recorder.micro_batches(range(2)):
                hand.pass_s(0.5)
            recorder.end_step()
            hand.pass_s(9.0)  # all-reduce and optimizer

    rows = recorder.path.read_text().splitlines()[1:]
    assert rows == ["0,0,0,0.5", "0,0,1,0.5", "1,0,0,0.5", "1,0,1,0.5"]


def test_one_loop_over_all_batches_ends_its_steps_inside(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        for number in recorder.micro_batches(range(4)):
            hand.pass_s(0.25 * (number + 1))
            if number % 2 == 1:
                recorder.end_step()
                hand.pass_s(9.0)  # all-reduce and optimizer

    rows = recorder.path.read_text().splitlines()[1:]
    assert rows == ["0,0,0,0.25", "0,0,1,0.5", "1,0,0,0.75", "1,0,1,1"]


def test_two_loops_in_a_step_are_one_step(hand: HandClock, tmp_path: Path) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        for seconds in (0.5, 0.25):
            for _ in recorder.micro_batches(range(1)):
                hand.pass_s(seconds)
            hand.pass_s(3.0)  # between the loops
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.5\n0,0,1,0.25\n"


def test_a_loop_that_is_left_has_finished_its_micro_batch(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        for number in recorder.micro_batches(range(4)):
            hand.pass_s(0.5)
            if number == 1:
                break
        hand.pass_s(3.0)
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.5\n0,0,1,0.5\n"


def test_a_step_is_in_the_file_as_soon_as_it_ends(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        for _ in recorder.micro_batches(range(1)):
            hand.pass_s(0.5)
        assert recorder.path.read_text() == HEADER
        recorder.end_step()
        assert recorder.path.read_text() == f"{HEADER}0,0,0,0.5\n"


def test_a_step_without_micro_batches_is_counted_and_not_written(
    hand: HandClock, tmp_path: Path
) -> None:
    with recorder_on(hand, tmp_path / "t.csv") as recorder:
        recorder.end_step()
        for _ in recorder.micro_batches(range(1)):
            hand.pass_s(0.5)
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}1,0,0,0.5\n"


def test_the_first_steps_are_left_out(hand: HandClock, tmp_path: Path) -> None:
    with record_latencies(tmp_path / "t.csv", clock=hand.clock()) as recorder:
        for step in range(7):
            for _ in recorder.micro_batches(range(1)):
                hand.pass_s(0.5 * step)
            recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}5,0,0,2.5\n6,0,0,3\n"


def test_a_recording_of_warm_up_only_is_warned_about(
    hand: HandClock, tmp_path: Path
) -> None:
    with (
        pytest.warns(UserWarning, match=r"t\.csv: nothing was recorded; 0 steps"),
        record_latencies(tmp_path / "t.csv", clock=hand.clock()),
    ):
        pass


def test_an_error_in_the_loop_comes_out_and_what_was_recorded_stays(
    hand: HandClock, tmp_path: Path
) -> None:
    recorder = recorder_on(hand, tmp_path / "t.csv")

    def train() -> None:
        with recorder:
            for number in recorder.micro_batches(range(2)):
                if number == 1:
                    raise LookupError
                hand.pass_s(0.5)
                recorder.end_step()

    with pytest.raises(LookupError):
        train()
    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.5\n"


# -- where a micro-batch ends ----------------------------------------------------------


class Slow(torch.autograd.Function):
    """Takes time in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hand: HandClock, seconds: float) -> Tensor:
        ctx.hand, ctx.seconds = hand, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.hand.pass_s(ctx.seconds)
        return grads[0], None, None


def loss_of(model: nn.Module, hand: HandClock, seconds: float) -> Tensor:
    x = torch.ones(1, 2, requires_grad=True)
    out: Tensor = Slow.apply(model(x), hand, seconds)  # type: ignore[no-untyped-call]
    return out.sum()


def test_with_a_model_a_micro_batch_ends_with_its_last_gradient(
    hand: HandClock, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    with recorder_on(hand, tmp_path / "t.csv", model) as recorder:
        for _ in recorder.micro_batches(range(2)):
            hand.pass_s(0.25)
            torch.autograd.backward(loss_of(model, hand, 0.5))
            hand.pass_s(9.0)  # waits for other ranks
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.75\n0,0,1,0.75\n"


def test_the_last_of_several_backwards_ends_a_micro_batch(
    hand: HandClock, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    with recorder_on(hand, tmp_path / "t.csv", model) as recorder:
        for _ in recorder.micro_batches(range(1)):
            torch.autograd.backward(loss_of(model, hand, 0.5))
            torch.autograd.backward(loss_of(model, hand, 0.25))
            hand.pass_s(9.0)
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.75\n"


def test_a_micro_batch_without_a_backward_ends_with_the_body(
    hand: HandClock, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with recorder_on(hand, tmp_path / "t.csv", model) as recorder:
        torch.autograd.backward(loss_of(model, hand, 0.5))  # outside: not counted
        for _ in recorder.micro_batches(range(1)):
            hand.pass_s(0.5)
        recorder.end_step()

    assert recorder.path.read_text() == f"{HEADER}0,0,0,0.5\n"


def test_a_closed_recorder_leaves_the_model_alone(
    hand: HandClock, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    recorder = recorder_on(hand, tmp_path / "t.csv", model)
    running = recorder.micro_batches(range(2))
    next(running)
    recorder.close()
    recorder.close()

    torch.autograd.backward(loss_of(model, hand, 0.5))

    assert recorder.path.read_text() == HEADER


def test_a_device_s_own_times_are_read_when_the_step_ends(tmp_path: Path) -> None:
    """S06: the host queues 50 and 70 ms and returns at once."""
    device = FakeDevice()
    clock = EventClock(device.make_event, sleep=device.host.pass_s)
    with record_latencies(tmp_path / "t.csv", warmup_steps=0, clock=clock) as recorder:
        begun_s = device.host.now_s
        for seconds in recorder.micro_batches((0.05, 0.07)):
            device.queue(seconds)
        assert device.host.now_s == begun_s  # no wait within the step
        recorder.end_step()

    rows = recorder.path.read_text().splitlines()[1:]
    assert [float(row.split(",")[3]) for row in rows] == pytest.approx([0.05, 0.07])


# -- files and places ------------------------------------------------------------------


def test_the_rank_stands_in_the_name_and_in_the_rows(
    hand: HandClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with recorder_on(hand, tmp_path / "t-{rank}.csv") as recorder:
            for _ in recorder.micro_batches(range(2)):
                hand.pass_s(0.5)
            recorder.end_step()

    trace = read_trace(tmp_path)
    assert trace.workers == ("0", "1")
    assert trace.latency_s_SWM.tolist() == [[[0.5, 0.5], [0.5, 0.5]]]


def test_ranks_that_would_write_into_one_file_are_told(
    hand: HandClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(ConfigError, match=r"all 4 ranks would write into .*put {rank}"):
        recorder_on(hand, tmp_path / "t.csv")


def test_settings_that_make_no_sense_are_told(hand: HandClock, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"into a \.csv file, not .*t\.parquet"):
        recorder_on(hand, tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="warmup_steps is 0 or more steps, not -1"):
        recorder_on(hand, tmp_path / "t.csv", warmup_steps=-1)


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1)])
def test_without_a_clock_the_device_s_own_is_taken(
    tmp_path: Path, model: nn.Module | None
) -> None:
    with record_latencies(tmp_path / "t.csv", model=model, warmup_steps=0) as recorder:
        for _ in recorder.micro_batches(range(1)):
            pass
        recorder.end_step()

    (row,) = recorder.path.read_text().splitlines()[1:]
    assert 0.0 < float(row.split(",")[3]) < 10.0


def test_an_old_recording_is_replaced(hand: HandClock, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("old\n")

    recorder_on(hand, tmp_path / "t.csv").close()

    assert (tmp_path / "t.csv").read_text() == HEADER


@pytest.mark.slow
@pytest.mark.processes
def test_waiting_for_the_other_rank_in_ddp_is_not_recorded(tmp_path: Path) -> None:
    """S05: in the example both ranks now and then sleep 10 ms, and wait for each other.

    Were that counted, both would be slow at the same time.
    """
    script = Path(__file__).parents[2] / "examples" / "record_trace.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    subprocess.run(
        [sys.executable, *torchrun, str(script), str(tmp_path)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=50,
    )

    trace = read_trace(tmp_path)

    assert trace.latency_s_SWM.shape == (20, 2, 4)
    is_slow_SWM = trace.latency_s_SWM > 0.01
    assert is_slow_SWM.sum() > 20
    together = is_slow_SWM.all(axis=1).sum()
    assert together < is_slow_SWM.any(axis=1).sum() / 2

"""The callback under Lightning's own Trainer: two ranks in processes, exact values."""

import subprocess
import sys
from typing import Any

import pytest

from training.adapters.launch import run_ranks

in_processes = [
    pytest.mark.processes,
    pytest.mark.sockets,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each rank found, by the name of the function."""
    pytest.importorskip("lightning", reason="the extra 'adapters' is not installed")
    return run_ranks("lightning_ranks.py")


class TestInProcesses:
    """With real ranks."""

    pytestmark = in_processes

    def test_s03_a_short_window_counts_in_full(
        self, told: list[dict[str, Any]]
    ) -> None:
        """Nine micro-batches of 3 in windows of 4: Lightning alone gives 0.75 last."""
        for one in told:
            grads, computed, total_weight, _ = one["last_window"]
            assert grads == [3.0, 3.0, 3.0]
            assert computed == 9
            assert total_weight == 0.5  # one of four on each of two ranks

    def test_the_state_goes_into_a_checkpoint(self, told: list[dict[str, Any]]) -> None:
        assert told[0]["last_window"][3] == 3

    def test_what_a_threshold_drops_leaves_the_denominator(
        self, told: list[dict[str, Any]]
    ) -> None:
        """2, 6, 1 and 10, (14), 3: 22 / 5. The module gets its training_step back."""
        assert [one["dropped"][0] for one in told] == 2 * [[pytest.approx(4.4, 1e-6)]]
        assert [one["dropped"][1:3] for one in told] == [[3, False], [2, False]]

    def test_the_report_says_what_was_planned_and_computed(
        self, told: list[dict[str, Any]]
    ) -> None:
        assert [one["dropped"][3] for one in told] == [[3, 3, 5, 6], [2, 3, 5, 6]]

    def test_a_module_that_accumulates_by_itself_keeps_its_denominator(
        self, told: list[dict[str, Any]]
    ) -> None:
        """Means of (3 + 5) / 2 and (7 + 9) / 2."""
        assert [one["manual"] for one in told] == 2 * [[6.0]]

    def test_s04_micro_batches_count_by_their_tokens(
        self, told: list[dict[str, Any]]
    ) -> None:
        assert [one["tokens"] for one in told] == 2 * [[[2.6875]]]  # 43 / 16

    def test_an_error_on_one_rank_is_told_to_the_other(
        self, told: list[dict[str, Any]]
    ) -> None:
        assert [one["failed"] for one in told] == [
            "RemoteError: rank 1 ended the job: ValueError: no such label",
            "no such label",
        ]


@pytest.mark.processes
@pytest.mark.slow
def test_without_lightning_the_import_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None"
        "\nimport tailbound.training.adapters.lightning"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60.0
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "MissingExtraError: this adapter needs Lightning: "
        "pip install 'tailbound[adapters]'"
    )

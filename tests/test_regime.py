"""The critical-regime detector."""

import json
import math
from typing import Any

import numpy as np
import pytest

from tailbound.config import LossBound
from tailbound.errors import ConfigError, ShapeError
from tailbound.reduction import FORMATS
from tailbound.regime import Decision, RegimeDetector, RegimeStatistics
from tailbound.residual import Residual

NAN, INF = float("nan"), float("inf")


def feed(detector: RegimeDetector, norms: Any, **settings: Any) -> list[Decision]:
    """Give the detector one norm a round, counted from 1."""
    return [
        detector.update(norm, counter=counter, **settings)
        for counter, norm in enumerate(norms, 1)
    ]


def regimes(decisions: list[Decision]) -> str:
    """One letter a decision: C for critical, n for not."""
    return "".join("C" if decision.critical else "n" for decision in decisions)


def checks(decisions: list[Decision]) -> list[int]:
    """Counters of the rounds that compared."""
    return [d.counter for d in decisions if d.ratio is not None]


def test_training_starts_critical_under_p_low() -> None:
    detector = RegimeDetector(LossBound(p_low=0.01, p_high=0.4))

    assert detector.critical
    assert detector.p == 0.01


def test_quiet_norms_change_to_p_high_at_the_first_check() -> None:
    detector = RegimeDetector(LossBound(p_low=0.01, p_high=0.4, frequency=3))

    decisions = feed(detector, [1.0, 1.0, 1.0])

    assert regimes(decisions) == "CCn"
    assert [d.p for d in decisions] == [0.01, 0.01, 0.4]
    assert detector.p == 0.4
    assert not detector.critical


def test_every_decision_says_what_was_seen_and_why() -> None:
    detector = RegimeDetector(LossBound(frequency=2))

    decisions = feed(detector, [2.0, 1.0, 1.0, 0.75])

    assert decisions == [
        Decision(1, 2.0, None, True, 0.008, "no check"),
        Decision(2, 1.0, 0.5, True, 0.008, "ratio 0.5 >= 0.5: critical for 2 rounds"),
        Decision(3, 1.0, None, True, 0.008, "no check"),
        Decision(4, 0.75, 0.25, False, 0.408, "ratio 0.25 < 0.5: p 0.408"),
    ]


@pytest.mark.parametrize(
    ("test", "norms", "ratio", "critical"),
    [
        ("change", [1.0, 0.5], 0.5, True),
        ("change", [1.0, 0.51], 0.49, False),
        ("change", [1.0, 1.5], 0.5, True),
        ("change", [1.0, 1.49], 0.49, False),
        ("drop", [1.0, 0.5], 0.5, True),
        ("drop", [1.0, 0.51], 0.49, False),
        ("drop", [1.0, 1.5], -0.5, False),
        ("drop", [1.0, 50.0], -49.0, False),
    ],
)
def test_relative_change_of_eta_or_more_is_critical(
    test: Any, norms: list[float], ratio: float, critical: bool
) -> None:
    detector = RegimeDetector(LossBound(eta=0.5, frequency=2, test=test))

    decision = feed(detector, norms)[-1]

    assert decision.ratio == pytest.approx(ratio)
    assert decision.critical is critical


def test_a_critical_verdict_holds_for_frequency_rounds() -> None:
    """Critical at the check of round 6: rounds 7 to 9 run under p_low."""
    detector = RegimeDetector(LossBound(frequency=3))

    decisions = feed(detector, [1.0, 1.0, 1.0, 1.0, 1.0, 0.4, 0.4, 0.4, 0.4, 0.4])

    assert regimes(decisions) == "CCnnnCCCnn"
    assert checks(decisions) == [3, 6, 9]


def test_a_change_between_two_checks_is_not_seen_when_steps_are_compared() -> None:
    detector = RegimeDetector(LossBound(frequency=3, compare="step"))

    decisions = feed(detector, [1.0, 1.0, 1.0, 0.1, 0.1, 0.1])

    assert regimes(decisions) == "CCnnnn"


def test_a_change_between_two_checks_is_seen_when_checks_are_compared() -> None:
    """The first norm stands in for the check before the first."""
    detector = RegimeDetector(LossBound(frequency=3, compare="check"))

    decisions = feed(detector, [1.0, 1.0, 0.8, 0.1, 0.1, 0.4, 9.0, 9.0, 0.4])

    assert regimes(decisions) == "CCnnnCCCn"
    assert [d.ratio for d in decisions if d.ratio is not None] == [
        pytest.approx(0.2),
        pytest.approx(0.5),
        0.0,
    ]


@pytest.mark.parametrize("compare", ["step", "check"])
def test_a_check_in_every_round_starts_with_the_second(compare: Any) -> None:
    detector = RegimeDetector(LossBound(frequency=1, compare=compare))

    decisions = feed(detector, [1.0, 0.9, 0.3, 0.3])

    assert checks(decisions) == [2, 3, 4]
    assert regimes(decisions) == "CnCn"
    assert decisions[0].verdict.startswith("no check: ")


def test_window_compares_the_mean_of_the_norms_with_the_window_before() -> None:
    """Means of two: 1.0 then 0.75; then 0.75 then 0.2."""
    detector = RegimeDetector(LossBound(frequency=4, window=2))

    decisions = feed(detector, [0.5, 1.5, 0.5, 1.0, 0.5, 1.0, 0.1, 0.3])

    assert checks(decisions) == [4, 8]
    assert decisions[3].ratio == pytest.approx(0.25)
    assert decisions[7].ratio == pytest.approx(0.55 / 0.75)
    assert regimes(decisions) == "CCCnnnnC"


def test_window_longer_than_the_frequency_delays_the_first_check_only() -> None:
    detector = RegimeDetector(LossBound(frequency=2, window=3))

    decisions = feed(detector, [1.0] * 10)

    assert checks(decisions) == [6, 8, 10]
    assert decisions[1].verdict == "no check: too few norms to compare"


def test_window_is_compared_with_the_window_at_the_last_check() -> None:
    """Means of two: 1.0 (rounds 1, 2), 0.9 at round 3, 0.3 at round 6."""
    detector = RegimeDetector(LossBound(frequency=3, window=2, compare="check"))

    decisions = feed(detector, [1.0, 1.0, 0.8, 5.0, 0.2, 0.4])

    assert checks(decisions) == [3, 6]
    assert decisions[2].ratio == pytest.approx(0.1)
    assert decisions[5].ratio == pytest.approx(0.6 / 0.9)


def test_a_first_window_that_fills_at_a_check_is_what_the_next_compares_with() -> None:
    detector = RegimeDetector(LossBound(frequency=3, window=3, compare="check"))

    decisions = feed(detector, [1.0, 1.0, 1.0, 0.4, 0.4, 0.4])

    assert decisions[2].verdict == "no check: first norm to compare with"
    assert checks(decisions) == [6]
    assert decisions[5].ratio == pytest.approx(0.6)


@pytest.mark.parametrize("test", ["change", "drop"])
@pytest.mark.parametrize("current", [0.0, 1.0])
def test_a_previous_norm_of_zero_is_critical(test: Any, current: float) -> None:
    detector = RegimeDetector(LossBound(frequency=2, test=test))

    decision = feed(detector, [0.0, current])[-1]

    assert decision.critical
    assert decision.ratio == INF
    assert decision.verdict == "previous norm 0: critical"


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_norm_that_is_not_finite_is_ignored_and_its_check_made_up_for(
    bad: float,
) -> None:
    """The check of round 4 is done at round 6, against the last finite norm."""
    detector = RegimeDetector(LossBound(frequency=2))

    decisions = feed(detector, [1.0, 1.0, 1.0, bad, bad, 0.4, 0.4, 0.4])

    assert regimes(decisions) == "CnnnnCCn"
    assert checks(decisions) == [2, 6, 8]
    assert math.isnan(decisions[3].norm)
    assert decisions[3].verdict == "norm not finite: ignored"
    assert decisions[5].ratio == pytest.approx(0.6)
    assert detector.statistics() == RegimeStatistics(
        checks=3, critical_checks=1, ignored=2
    )


def test_layers_are_combined_even_if_their_squares_overflow() -> None:
    decision = RegimeDetector(LossBound()).update([3e200, 4e200], counter=1)

    assert decision.norm == pytest.approx(5e200)


def test_a_fall_of_the_learning_rate_is_critical_at_once_for_frequency_rounds() -> None:
    detector = RegimeDetector(LossBound(frequency=3, lr_rule=True))
    rates = [0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]

    decisions = [
        detector.update(1.0, counter=counter, learning_rate=rate)
        for counter, rate in enumerate(rates, 1)
    ]

    assert regimes(decisions) == "CCnCCCn"
    assert decisions[3].verdict == "learning rate fell: critical"
    assert checks(decisions) == [3, 7]


def test_a_rising_or_untold_learning_rate_is_no_fall() -> None:
    detector = RegimeDetector(LossBound(frequency=2, lr_rule=True))
    rates = [0.1, 0.1, 0.2, None, 0.2]

    decisions = [
        detector.update(1.0, counter=counter, learning_rate=rate)
        for counter, rate in enumerate(rates, 1)
    ]

    assert regimes(decisions) == "Cnnnn"


def test_a_fall_counts_even_if_the_norm_is_not_finite() -> None:
    detector = RegimeDetector(LossBound(frequency=1, lr_rule=True))
    feed(detector, [1.0, 1.0], learning_rate=0.1)

    decision = detector.update(NAN, counter=3, learning_rate=0.05)

    assert decision.critical
    assert decision.verdict == "learning rate fell: critical"
    assert detector.statistics().ignored == 1


def test_the_learning_rate_is_left_out_unless_asked_for() -> None:
    detector = RegimeDetector(LossBound(frequency=2))
    feed(detector, [1.0, 1.0], learning_rate=0.1)

    assert not detector.update(1.0, counter=3, learning_rate=0.01).critical


def test_the_layer_with_the_largest_change_decides() -> None:
    """The whole norm moves by 0.6 %, the small layer by 60 %."""
    norms = [[10.0, 1.0], [10.0, 0.4]]

    by_layer = feed(RegimeDetector(LossBound(frequency=2, per_layer=True)), norms)[-1]
    whole = feed(RegimeDetector(LossBound(frequency=2)), norms)[-1]

    assert by_layer.critical
    assert by_layer.ratio == pytest.approx(0.6)
    assert not whole.critical
    assert whole.ratio == pytest.approx(0.00417, abs=1e-4)
    assert by_layer.norm == whole.norm == pytest.approx(math.sqrt(100.16))


def test_a_layer_that_stays_zero_does_not_decide() -> None:
    detector = RegimeDetector(LossBound(frequency=2, per_layer=True))

    decision = feed(detector, [[1.0, 0.0], [0.9, 0.0]])[-1]

    assert not decision.critical
    assert decision.ratio == pytest.approx(0.1)


@pytest.mark.parametrize(("test", "critical"), [("change", True), ("drop", False)])
def test_a_layer_that_wakes_up_is_a_change_and_no_drop(
    test: Any, critical: bool
) -> None:
    detector = RegimeDetector(LossBound(frequency=2, per_layer=True, test=test))

    assert feed(detector, [[1.0, 0.0], [0.9, 0.3]])[-1].critical is critical


def test_one_layer_that_is_not_finite_makes_the_norm_so() -> None:
    detector = RegimeDetector(LossBound(frequency=2, per_layer=True))

    feed(detector, [[1.0, 1.0], [INF, 1.0]])

    assert detector.statistics().ignored == 1


def test_layers_are_combined_to_the_norm_of_the_whole() -> None:
    decision = RegimeDetector(LossBound()).update(np.array([3.0, 4.0]), counter=1)

    assert decision.norm == 5.0


def test_a_norm_is_corrected_for_holes() -> None:
    decision = RegimeDetector(LossBound()).update(0.8, counter=1, share_received=0.64)

    assert decision.norm == pytest.approx(1.0)


@pytest.mark.parametrize(
    "bound", [LossBound(correct_holes=False), LossBound(holes="residual")]
)
def test_a_norm_is_taken_as_it_is_without_the_correction(bound: LossBound) -> None:
    detector = RegimeDetector(bound)

    assert detector.update(0.8, counter=1, share_received=0.64).norm == 0.8


def test_correction_gives_back_the_norm_of_a_million_entries() -> None:
    """40.8 % of the chunks zeroed leave 0.769 of the norm; corrected within 1 %."""
    rng = np.random.default_rng(11)
    grad_CE = rng.standard_normal((2500, 400))
    full = float(np.linalg.norm(grad_CE))
    grad_CE[rng.permutation(2500)[:1020]] = 0.0
    holed = float(np.linalg.norm(grad_CE))

    decision = RegimeDetector(LossBound()).update(
        holed, counter=1, share_received=0.592
    )

    assert holed / full == pytest.approx(0.769, abs=0.005)
    assert decision.norm == pytest.approx(full, rel=0.01)


def test_with_a_residual_the_norm_of_independent_gradients_is_whole() -> None:
    """What is lost in one round comes in a later one: 40.8 % leave 1.00 of the norm."""
    rng = np.random.default_rng(12)
    residual = Residual(100_000, 100, FORMATS["float64"])
    norms = []
    for _ in range(30):
        grad_N = rng.standard_normal(100_000)
        residual.apply(grad_N)
        arrived_C = np.ones(1000, np.bool_)
        arrived_C[rng.permutation(1000)[:408]] = False
        residual.note(arrived_C)
        norms.append(np.linalg.norm(grad_N.reshape(1000, 100)[arrived_C]))

    # Of 100 000 normal entries: sqrt(100 000) is 316.2.
    assert np.mean(norms[10:]) == pytest.approx(316.2, rel=0.01)


def test_more_loss_alone_is_not_critical() -> None:
    """From all to 20 % received, the raw norm halves and more."""
    raw = RegimeDetector(LossBound(frequency=2, correct_holes=False))
    corrected = RegimeDetector(LossBound(frequency=2))

    for detector in (raw, corrected):
        detector.update(1.0, counter=1, share_received=1.0)
        detector.update(math.sqrt(0.2), counter=2, share_received=0.2)

    assert raw.critical
    assert not corrected.critical


def test_norms_are_compared_without_the_loss_scale() -> None:
    detector = RegimeDetector(LossBound(frequency=2))

    detector.update(65536.0, counter=1, loss_scale=65536.0)
    decision = detector.update(32768.0, counter=2, loss_scale=32768.0)

    assert decision.norm == 1.0
    assert decision.ratio == 0.0


def test_equal_bounds_are_a_fixed_bound_whatever_the_norms() -> None:
    detector = RegimeDetector(LossBound.fixed(0.1))

    decisions = feed(detector, [1.0, 9.0, 0.0, NAN] * 10)

    assert {d.p for d in decisions} == {0.1}


def test_a_detector_goes_on_from_its_state_as_if_it_had_not_stopped() -> None:
    bound = LossBound(frequency=3, window=2, compare="check", lr_rule=True)
    norms = [1.0, 0.7, NAN, 0.5, 0.3, 0.3, 0.29, 0.1, 0.1, 0.1, 0.1, 0.1]
    whole = feed(RegimeDetector(bound), norms, learning_rate=0.1)
    first = RegimeDetector(bound)
    feed(first, norms[:5], learning_rate=0.1)

    second = RegimeDetector(bound)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [
        second.update(norm, counter=counter, learning_rate=0.1)
        for counter, norm in enumerate(norms[5:], 6)
    ]

    assert rest == whole[5:]
    assert "critical for 3 rounds" in " ".join(d.verdict for d in rest)
    assert second.statistics().ignored == 1


def test_state_of_a_new_detector_can_be_loaded() -> None:
    detector = RegimeDetector(LossBound(frequency=2))
    feed(detector, [1.0, 1.0])

    detector.load_state_dict(RegimeDetector(LossBound(frequency=2)).state_dict())

    assert detector.critical
    assert detector.statistics() == RegimeStatistics(0, 0, 0)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_norms_of_other_tensors_are_forgotten_once_after_a_restart(
    before: int, after: int
) -> None:
    bounds = [
        LossBound(frequency=1, compare="check", per_layer=num > 1)
        for num in (before, after)
    ]
    first, second = RegimeDetector(bounds[0]), RegimeDetector(bounds[1])
    feed(first, [[1.0] * before, [1.1] * before])

    second.load_state_dict(first.state_dict())
    decisions = feed(second, [[9.0] * after, [9.0] * after])

    assert decisions[0].verdict == "no check: first norm to compare with"
    assert (decisions[1].ratio, decisions[1].critical) == (0.0, False)
    if after > 1:
        with pytest.raises(ShapeError, match=f"{after} tensors had a norm so far"):
            second.update([1.0] * (after + 1), counter=3)


def test_a_state_under_a_shorter_frequency_checks_no_later_than_that() -> None:
    detector = RegimeDetector(LossBound(frequency=2))

    detector.load_state_dict(RegimeDetector(LossBound(frequency=50)).state_dict())

    assert checks(feed(detector, [1.0, 1.0])) == [2]


@pytest.mark.parametrize(
    "damage", [{"history": None}, {"checks": "many"}, {"learning_rate": []}]
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    detector = RegimeDetector(LossBound(frequency=2))
    feed(detector, [1.0, 1.0, 2.0])
    before = detector.state_dict()

    with pytest.raises(ConfigError, match="not the state of a regime detector"):
        detector.load_state_dict({**before, **damage})
    with pytest.raises(ConfigError, match="KeyError"):
        detector.load_state_dict({})

    assert detector.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share_received": 0.0}, r"share_received is in \(0, 1\], not 0.0"),
        ({"share_received": 1.1}, r"share_received is in \(0, 1\], not 1.1"),
        ({"loss_scale": 0.0}, "loss_scale is a positive number, not 0.0"),
        ({"loss_scale": INF}, "loss_scale is a positive number, not inf"),
    ],
)
def test_what_is_out_of_range_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RegimeDetector(LossBound()).update(1.0, counter=1, **settings)


def test_a_negative_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a norm is 0 or more, not -1\.0"):
        RegimeDetector(LossBound()).update([2.0, -1.0], counter=1)


@pytest.mark.parametrize("norms", [[], [[1.0, 2.0]]])
def test_norms_that_are_no_row_are_refused(norms: Any) -> None:
    with pytest.raises(ShapeError, match=r"norms are a number or \(L,\)"):
        RegimeDetector(LossBound()).update(norms, counter=1)


def test_another_number_of_layers_is_refused_and_changes_nothing() -> None:
    detector = RegimeDetector(LossBound(per_layer=True))
    detector.update([1.0, 2.0], counter=1)
    before = detector.state_dict()

    with pytest.raises(ShapeError, match="2 tensors had a norm so far, now 3"):
        detector.update([1.0, 2.0, 3.0], counter=2)

    assert detector.state_dict() == before


def test_the_callers_array_may_be_reused() -> None:
    detector = RegimeDetector(LossBound(frequency=2, per_layer=True))
    norm_L = np.array([1.0, 1.0])
    detector.update(norm_L, counter=1)
    norm_L[:] = 0.2

    assert detector.update(norm_L, counter=2).ratio == pytest.approx(0.8)

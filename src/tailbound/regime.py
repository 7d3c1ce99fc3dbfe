"""Decide from gradient norms how much may be lost: norms in, loss bound out.

Training starts in the critical regime. Every ``frequency`` rounds a check compares
two norms of the reduced gradient; its verdict holds until the next check:

    CRITICAL (p_low) --relative change < eta--> NON-CRITICAL (p_high)
    NON-CRITICAL --change >= eta, previous norm 0, or learning rate fell--> CRITICAL

Sans-IO: one rank runs the detector and tells the others p (DESIGN, 4).

Source: DBLP, server algorithm; Accordion (Agarwal et al. 2021); spec N8.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailbound.config import LossBound
from tailbound.errors import ConfigError, ShapeError

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Decision:
    """What one round's norm led to; goes into the step's record."""

    counter: int
    """The round whose norm it was."""
    norm: float
    """L2 norm of the whole gradient, unscaled, corrected for holes if so set; NaN if
    it was not finite."""
    ratio: float | None
    """Relative change that was compared with eta, inf after a norm of 0; None: no
    check here."""
    critical: bool
    """Regime of the next rounds."""
    p: float
    """Loss bound of the next rounds, a share in [0, 1)."""
    verdict: str
    """The same for people, with the reason."""


@dataclass(frozen=True, slots=True)
class RegimeStatistics:
    """What a detector did so far."""

    checks: int
    """Comparisons of two norms."""
    critical_checks: int
    """Those that found the training critical."""
    ignored: int
    """Norms that were not finite."""


class RegimeDetector:
    """The critical-regime detector of one job."""

    def __init__(self, bound: LossBound) -> None:
        self.bound = bound
        self.critical = True
        """True if the next rounds run under p_low."""
        self.due_in = bound.frequency
        self.history: deque[F64] = deque(maxlen=2 * bound.window)
        self.at_check: F64 | None = None
        self.learning_rate: float | None = None
        self.checks = self.critical_checks = self.ignored = 0
        self.is_resumed = False
        """The history is a checkpoint's, maybe of other tensors or settings."""

    @property
    def p(self) -> float:
        """Loss bound of the next rounds, a share in [0, 1)."""
        return self.bound.p_low if self.critical else self.bound.p_high

    def update(
        self,
        norm_L: ArrayLike,
        *,
        counter: int,
        share_received: float = 1.0,
        loss_scale: float = 1.0,
        learning_rate: float | None = None,
    ) -> Decision:
        """Take in one round's norm; every ``frequency`` rounds, check.

        A check that meets a norm that is not finite, or too few norms to compare,
        is made up for in the first round that allows it. With ``lr_rule`` a fall of
        the learning rate is critical for the next ``frequency`` rounds, then the next
        check follows; a schedule that decays in every step thus never leaves p_low.

        Args:
            norm_L: L2 norm of the reduced gradient, or of each of its L tensors.
                With ``per_layer`` the largest relative change decides, where a tensor
                whose norm stays 0 has not changed; otherwise they are combined.
            counter: the round's counter, for the record.
            share_received: share in (0, 1] of the gradient's elements that are no
                holes. The norm is divided by its root if ``correct_holes`` is set.
            loss_scale: what the loss was multiplied by, > 0.
            learning_rate: of this round; None leaves ``lr_rule`` out.

        Returns:
            The decision for the next rounds.

        Raises:
            ConfigError: share_received, loss_scale or a norm is out of range.
            ShapeError: the number of tensors has changed.
        """
        norm_L = self.unscaled(norm_L, share_received, loss_scale)
        norm = math.hypot(*norm_L.tolist())
        is_finite = math.isfinite(norm)
        compared_L = norm_L if self.bound.per_layer else np.array([norm])
        is_first = self.remember(compared_L) if is_finite else False
        self.ignored += not is_finite
        self.due_in = max(0, self.due_in - 1)
        ratio: float | None = None
        if self.has_fallen(learning_rate):
            self.due_in, self.critical = self.bound.frequency, True
            verdict = "learning rate fell: critical"
        elif not is_finite:
            verdict = "norm not finite: ignored"
        elif self.due_in > 0:
            verdict = "no check"
        elif is_first:
            self.due_in = self.bound.frequency
            verdict = "no check: first norm to compare with"
        else:
            ratio, verdict = self.check()
        return Decision(
            counter=counter,
            norm=norm if is_finite else math.nan,
            ratio=ratio,
            critical=self.critical,
            p=self.p,
            verdict=verdict,
        )

    def statistics(self) -> RegimeStatistics:
        """Count what was done so far."""
        return RegimeStatistics(self.checks, self.critical_checks, self.ignored)

    def state_dict(self) -> dict[str, Any]:
        """The detector's memory as plain data, for a checkpoint."""
        return {
            "critical": self.critical,
            "due_in": self.due_in,
            "history": [norm_L.tolist() for norm_L in self.history],
            "at_check": None if self.at_check is None else self.at_check.tolist(),
            "learning_rate": self.learning_rate,
            "checks": self.checks,
            "critical_checks": self.critical_checks,
            "ignored": self.ignored,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The settings are not part of it and may differ.

        Norms of as many tensors as there are now are compared with, others forgotten.

        Raises:
            ConfigError: the state is not one that state_dict() made; nothing changed.
        """
        try:
            history = [
                np.array(norm_L, dtype=np.float64) for norm_L in state["history"]
            ]
            at_check = state["at_check"]
            if at_check is not None:
                at_check = np.array(at_check, dtype=np.float64)
            rate = state["learning_rate"]
            rate = None if rate is None else float(rate)
            counts = {
                name: int(state[name])
                for name in ("due_in", "checks", "critical_checks", "ignored")
            }
            critical = bool(state["critical"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"not the state of a regime detector: {error!r}"
            ) from error
        self.critical, self.at_check = critical, at_check
        self.learning_rate, self.is_resumed = rate, True
        self.history = deque(history, maxlen=2 * self.bound.window)
        self.due_in = min(counts["due_in"], self.bound.frequency)
        self.checks, self.ignored = counts["checks"], counts["ignored"]
        self.critical_checks = counts["critical_checks"]

    def unscaled(
        self, norm_L: ArrayLike, share_received: float, loss_scale: float
    ) -> F64:
        """Norms of the unscaled gradient without its holes (DESIGN, 7)."""
        if not 0.0 < share_received <= 1.0:
            raise ConfigError(f"share_received is in (0, 1], not {share_received}")
        if not (loss_scale > 0.0 and math.isfinite(loss_scale)):
            raise ConfigError(f"loss_scale is a positive number, not {loss_scale}")
        values_L = np.atleast_1d(np.asarray(norm_L, dtype=np.float64))
        if values_L.ndim != 1 or values_L.size == 0:
            raise ShapeError(f"norms are a number or (L,), not {values_L.shape}")
        if (values_L < 0.0).any():
            raise ConfigError(f"a norm is 0 or more, not {values_L.min()}")
        share = share_received if self.bound.corrects_norms else 1.0
        with np.errstate(over="ignore"):
            return values_L / (loss_scale * math.sqrt(share))

    def remember(self, norm_L: F64) -> bool:
        """Keep a norm; True if it completed the first window of norms.

        That window stands in for the check before the first.
        """
        if self.history and len(self.history[-1]) != len(norm_L):
            if not self.is_resumed:
                raise ShapeError(
                    f"{len(self.history[-1])} tensors had a norm so far, now "
                    f"{len(norm_L)}"
                )
            self.history.clear()
            self.at_check = None
        self.is_resumed = False
        self.history.append(norm_L)
        if self.bound.compare == "step" or self.at_check is not None:
            return False
        self.at_check = self.window_mean(0)
        return self.at_check is not None

    def has_fallen(self, learning_rate: float | None) -> bool:
        """Whether the learning rate is below the one told before, if that counts."""
        before = self.learning_rate
        if learning_rate is None:
            return False
        self.learning_rate = learning_rate
        return self.bound.lr_rule and before is not None and learning_rate < before

    def window_mean(self, age: int) -> F64 | None:
        """Mean of the window of norms that ended ``age`` norms ago; None: too few."""
        stop = len(self.history) - age
        start = stop - self.bound.window
        return np.mean(list(self.history)[start:stop], axis=0) if start >= 0 else None

    def check(self) -> tuple[float | None, str]:
        """Compare, set the regime until the next check, and say why."""
        compares_steps = self.bound.compare == "step"
        previous_L = (
            self.window_mean(self.bound.window) if compares_steps else self.at_check
        )
        current_L = self.window_mean(0)
        if previous_L is None or current_L is None:
            return None, "no check: too few norms to compare"
        ratio = relative_change(previous_L, current_L, self.bound.test == "drop")
        self.at_check, self.due_in = current_L, self.bound.frequency
        self.critical = ratio >= self.bound.eta
        self.checks += 1
        self.critical_checks += self.critical
        if math.isinf(ratio):
            return ratio, "previous norm 0: critical"
        if self.critical:
            return ratio, (
                f"ratio {ratio:.3g} >= {self.bound.eta:.3g}: "
                f"critical for {self.bound.frequency} rounds"
            )
        return ratio, f"ratio {ratio:.3g} < {self.bound.eta:.3g}: p {self.p:.3g}"


def relative_change(previous_L: F64, current_L: F64, only_drops: bool) -> float:
    """Largest relative change of a norm, inf if it was 0.

    Of several tensors, one whose norm stays 0 (frozen, unused) has not changed.

    Source: DBLP, server algorithm: |G_prev - G_curr| / G_prev.
    """
    was_zero_L = previous_L == 0.0
    if was_zero_L.all():
        return math.inf
    change_L = previous_L - current_L
    if not only_drops:
        change_L = np.abs(change_L)
    with np.errstate(over="ignore"):
        ratio_L = change_L / np.where(was_zero_L, 1.0, previous_L)
    grew_L = was_zero_L & (current_L > 0.0)
    ratio_L[grew_L] = -math.inf if only_drops else math.inf
    return float(ratio_L.max())

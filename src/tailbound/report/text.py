"""Numbers as people read them: three digits, a unit, and a dash for the unknown."""

import math

UNKNOWN = "–"  # noqa: RUF001 (an en dash is what a reader expects in an empty cell)


def six_digits(value: float) -> float:
    """Keep six significant digits; a measured time has no more."""
    return float(f"{value:.6g}")


def decimals_for(value: float) -> int:
    """Decimals that give a number about three significant digits, 0 to 2."""
    size = abs(value)
    return 0 if size >= 99.95 else 1 if size >= 9.995 else 2


def number(value: float | None) -> str:
    """Three significant digits: ``152``, ``21.3``, ``5.10``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.{decimals_for(value)}f}"


def with_unit(value: float | None, unit: str) -> str:
    """A number with its unit, or the dash alone."""
    text = number(value)
    return text if text == UNKNOWN else f"{text} {unit}"


def metric(value: float | None) -> str:
    """Four significant digits, trailing zeros kept, as metrics are compared."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:#.4g}".rstrip(".")


def percent(share: float | None) -> str:
    """A share in [0, 1] as ``40.8 %``; below 10 % with two decimals."""
    return with_unit(None if share is None else 100.0 * share, "%")


def bound(share: float) -> str:
    """A loss bound as the paper writes it: ``0.8 %``."""
    return f"{100.0 * share:.4g} %"


def times(ratio: float | None) -> str:
    """A ratio as ``4.20x``."""
    text = number(ratio)
    return text if text == UNKNOWN else f"{text}×"  # noqa: RUF001


def plural(count: float, noun: str) -> str:
    """A count, whole or a mean, with its noun: ``1 burst``, ``13.5 round trips``."""
    text = f"{count:.1f}".removesuffix(".0")
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def listing(names: list[str]) -> str:
    """Join names as a sentence does: ``a``, ``a and b``, ``a, b and c``."""
    head, last = names[:-1], names[-1]
    return f"{', '.join(head)} and {last}" if head else last

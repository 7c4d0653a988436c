"""A measure in a row: one number, or the median of samples with its quartiles."""

import statistics
from collections.abc import Iterable
from typing import Any


def rounded(value: float) -> float:
    """To four digits: the others are noise."""
    return float(f"{value:.4g}")


def summary(samples: Iterable[float]) -> dict[str, Any]:
    """The median of samples, and the quartiles around it."""
    values = list(samples)
    low, middle, high = (
        statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": rounded(middle), "quartiles": [rounded(low), rounded(high)]}


def median(measure: Any) -> float:
    return float(measure["median"] if isinstance(measure, dict) else measure)


def quartiles(measure: Any) -> tuple[float, float]:
    low, high = measure["quartiles"] if isinstance(measure, dict) else (measure, measure)
    return float(low), float(high)


def spread(measure: Any) -> float:
    """How far the farther quartile is from the median, as a part of it."""
    middle = median(measure)
    return max(abs(quartile / middle - 1) for quartile in quartiles(measure)) if middle else 0.0

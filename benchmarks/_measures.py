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
    low, centre, high = (
        statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": rounded(centre), "quartiles": [rounded(low), rounded(high)]}


def middle(measure: Any) -> float:
    return float(measure["median"] if isinstance(measure, dict) else measure)


def median(row: dict[str, Any], key: str) -> float | None:
    """Of this measure of a row, or None where it was not measured."""
    return None if row.get(key) is None else middle(row[key])


def quartiles(measure: Any) -> tuple[float, float]:
    low, high = measure["quartiles"] if isinstance(measure, dict) else (measure, measure)
    return float(low), float(high)


def spread(measure: Any) -> float:
    """How far the farther quartile is from the median, as a part of it."""
    centre = middle(measure)
    return max(abs(quartile / centre - 1) for quartile in quartiles(measure)) if centre else 0.0

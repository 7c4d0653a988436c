"""Doctor's findings: one row a check."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "skipped"
STATUSES = (PROBLEM, WARNING, SKIPPED, OK)  # the worst first


class Row(NamedTuple):
    status: str  #: "ok", "warning", "problem" or "skipped"
    what: str  #: what was looked at
    evidence: str  #: what was found
    cure: str | None = None


Found = list[tuple[str, list[Row]]]  # by section


def ok(what: str, evidence: str) -> Row:
    return Row(OK, what, evidence)


def warning(what: str, evidence: str, cure: str | None = None) -> Row:
    return Row(WARNING, what, evidence, cure)


def problem(what: str, evidence: str, cure: str | None = None) -> Row:
    return Row(PROBLEM, what, evidence, cure)


def skipped(what: str, evidence: str, cure: str | None = None) -> Row:
    """It could not be looked at."""
    return Row(SKIPPED, what, evidence, cure)

"""Counts that no other load disturbs: instructions of user space, and system calls.

Both run a worker twice in a process of its own, with a few and with many repetitions, and take
what the others add; `request` names a method of it whose argument `times` is their number.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from ._workers import Environment, Skipped, Skips, command, environment

PERF = ["perf", "stat", "-x,", "-e", "instructions:u"]
CALLGRIND = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
# Where a worker ends its heap depends on the memory of its modules, compiled or loaded: no brk.
STRACE = ["strace", "-f", "-c", "-U", "calls,name", "-e", "trace=!brk"]
FOUND = {"perf": r"^(\d+),[^,]*,instructions:u", "valgrind": r"Collected : (\d+)"}
FEW = 2  # the first pays for page faults and for splitting the VMA


class Counted:
    """A peer's worker as it is to be counted."""

    def __init__(
        self,
        make: Callable[..., Any],
        settings: dict[str, Any],
        variables: Environment,
        request: dict[str, Any],
    ) -> None:
        self._environment = environment(variables)
        self._make, self._settings, self._request = make, settings, request

    def into(self, row: dict[str, Any], times: int, wanted: Iterable[str]) -> Skips:
        """Counts these, "instructions" or "system_calls", into a row. Returns those it lacks."""
        skipped: Skips = []
        for measured in wanted:
            count = self.instructions if measured == "instructions" else self.system_calls
            try:
                row[measured] = count(times) + 0.0  # no -0
            except Skipped as reason:
                why = {"counting": measured, "reason": str(reason)}
                skipped.append({"line": row["line"], **why})
        return skipped

    def _run(self, counter: list[str], times: int) -> str:
        """A counter's output about one run, on its standard error. Raises Skipped."""
        try:
            done = subprocess.run(
                [*counter, *command(self._make, self._settings, self._request | {"times": times})],
                capture_output=True,
                text=True,
                errors="replace",
                env=self._environment,
            )
        except FileNotFoundError:
            raise Skipped(f"{counter[0]} is not installed") from None
        if done.returncode or '"result"' not in done.stdout:
            raise Skipped(f"{counter[0]}: {(done.stdout or done.stderr).strip()[-200:]}")
        return done.stderr

    def instructions(self, times: int) -> float:
        """Of user space, each time. Raises Skipped where neither tool is to be had."""
        reasons = []
        for counter in (PERF, CALLGRIND):
            try:
                few, many = (self._instructions(counter, n) for n in (FEW, FEW + times))
                return round((many - few) / times, 1)
            except Skipped as reason:
                reasons.append(str(reason))
        raise Skipped("; ".join(reasons))

    def _instructions(self, counter: list[str], times: int) -> int:
        found = re.search(FOUND[counter[0]], self._run(counter, times), re.M)
        if not found:
            raise Skipped(f"{counter[0]} counts no instructions here")
        return int(found[1])

    def system_calls(self, times: int) -> float:
        """Of the kernel, each time. Raises Skipped where strace is not to be had."""
        few, many = (self._system_calls(n) for n in (FEW, FEW + times))
        return round((many - few) / times, 2)

    def _system_calls(self, times: int) -> int:
        with tempfile.TemporaryDirectory() as directory:
            output = os.path.join(directory, "strace")
            self._run([*STRACE, "-o", output], times)
            with open(output) as lines:
                total = [line.split()[0] for line in lines if line.split()[1:] == ["total"]]
        if not total:
            raise Skipped("strace counts no system calls here")
        return int(total[0])

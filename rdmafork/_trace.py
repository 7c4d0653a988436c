"""Callers of fork() in Python under `rdmafork exec --trace-forks`: see startup/sitecustomize.py.

The engine's report names the C function that called fork(), which for all of Python is one. Here
each place is told once, on stderr, with its Python stack, before the fork: nothing of Python may
run in the engine's fork handler.
"""

from __future__ import annotations  # any Python may run it

import os
import sys
import traceback

_PLACES = 100  # a program that forks from more is no longer read

_begun = False
_told: set[tuple[tuple[str, int], ...]] = set()


def _tell() -> None:
    # The frame that called fork(); this one is the hook's.
    stack = traceback.extract_stack(sys._getframe(1))
    place = tuple((frame.filename, frame.lineno or 0) for frame in stack)
    if place in _told or len(_told) >= _PLACES:
        return
    _told.add(place)
    rank = os.environ.get("RDMAFORK_RANK")
    who = f"process {os.getpid()}" + (f", rank {rank}" if rank else "")
    text = f"rdmafork: fork() in {who}:\n{''.join(traceback.format_list(stack))}"
    try:
        # At once: lines of many processes do not mix.
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # stderr is closed


def begin() -> None:
    global _begun
    if not _begun:
        _begun = True
        os.register_at_fork(before=_tell)

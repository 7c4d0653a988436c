"""How far a benchmark is: a bar where rich and a terminal are, else a line for each step."""

import sys
from types import TracebackType
from typing import Any


class Progress:
    """progress(done of 1, "the step under way")."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = ""
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            columns = progress.Progress.get_default_columns()
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=1.0)
        return self

    def __exit__(
        self, t: type[BaseException] | None, v: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: float, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._name}: {text}")
        elif text != self._said:
            self._said = text
            print(f"{self._name}: {done:4.0%} {text}", file=sys.stderr, flush=True)

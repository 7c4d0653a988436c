"""Peers side by side, each in a process of its own.

One process has one engine, and libibverbs one tracker: what is compared runs apart. A worker is
a fresh interpreter that makes one object and calls a method of it for each line of JSON it reads:
{"do": name, ...}. It answers {"result": ...}, {"skipped": reason} or {"error": text}.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Environment = Mapping[str, str]
Workers = dict[str, "Worker"]
Skips = list[dict[str, Any]]

# The caller's sys.path: without it, modules of the directory would come first.
CODE = (
    f"import sys; sys.path[:] = sys.argv[4:]; from {__name__} import serve; serve(*sys.argv[1:4])"
)


class Skipped(Exception):
    """A peer or situation that this machine does not have, and why."""


class WorkerError(Exception):
    """A peer failed: its name, the call, and the error."""


def command(
    make: Callable[..., Any], settings: dict[str, Any], *requests: dict[str, Any]
) -> list[str]:
    """The command line of a worker: it serves the requests, or its standard input if none."""
    described = [make.__module__, make.__qualname__, json.dumps([settings, *requests])]
    return [sys.executable, "-c", CODE, *described, *sys.path]


def environment(settings: Environment) -> dict[str, str]:
    """The caller's environment, without variables that change a measurement, and with these."""
    # Dictionaries laid out by chance would be a difference between two processes.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RDMAV_", "IBV_", "RDMAFORK_"))
    }
    return kept | {"PYTHONHASHSEED": "0", **settings}


class Worker:
    def __init__(
        self,
        peer: str,
        make: Callable[..., Any],
        variables: Environment,
        settings: dict[str, Any],
    ) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            command(make, settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(variables),
            text=True,
            start_new_session=True,  # Ctrl-C is for the caller, which ends its workers
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Raises Skipped, or WorkerError with what the worker was doing."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do} | arguments), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        doing = f"{self.peer}, at {do}({', '.join(f'{k}={v}' for k, v in arguments.items())})"
        if not line:
            code = self._process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise WorkerError(f"{doing}: the process ended by {how}")
        reply = json.loads(line)
        if "skipped" in reply:
            raise Skipped(reply["skipped"])
        if "error" in reply:
            raise WorkerError(f"{doing}: {reply['error']}")
        return reply["result"]

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)


@contextlib.contextmanager
def started(
    make: Callable[..., Any], peers: Mapping[str, Environment], skipped: Skips, **settings: Any
) -> Iterator[Workers]:
    """A worker for each peer, made by make(peer=its name, **settings) in its environment.

    A peer that lacks something here is left out, and goes to skipped with the reason.
    """
    with contextlib.ExitStack() as stack:
        workers: Workers = {}
        for peer, variables in peers.items():
            workers[peer] = Worker(peer, make, variables, {"peer": peer} | settings)
            stack.callback(workers[peer].end)
        yield {peer: workers[peer] for peer in ask_all(workers, skipped, "ready")}


def ask_all(workers: Workers, skipped: Skips, do: str, **arguments: Any) -> dict[str, Any]:
    """Each worker's answer; a worker that cannot goes to skipped, with the arguments."""
    answers = {}
    for peer, worker in workers.items():
        try:
            answers[peer] = worker.ask(do, **arguments)
        except Skipped as reason:
            skipped.append({"line": peer, **arguments, "reason": str(reason)})
    return answers


def interleave(
    workers: Workers, peers: Iterable[str], rounds: int, do: str, **arguments: Any
) -> dict[str, list[Any]]:
    """A sample of each peer a round, in an order shuffled anew, so that all meet the same noise."""
    order = list(peers)
    samples: dict[str, list[Any]] = {peer: [] for peer in order}
    shuffle = random.Random(rounds).shuffle
    for _ in range(rounds):
        shuffle(order)
        for peer in order:
            samples[peer].append(workers[peer].ask(do, **arguments))
    return samples


# ---- in the worker ---------------------------------------------------------------------


def serve(module: str, name: str, described: str) -> None:
    settings, *requests = json.loads(described)
    made: list[Any] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if not made:
                made.append(getattr(importlib.import_module(module), name)(**settings))
            do = request.pop("do")
            return {"result": None if do == "ready" else getattr(made[0], do)(**request)}
        except Skipped as reason:
            return {"skipped": str(reason)}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            return {"error": f"{type(error).__name__}: {error} ({place})"}

    for request in requests or map(json.loads, sys.stdin):
        print(json.dumps(answer(request)), flush=True)

"""Hours of tests/soak, seed after seed: make soak, and in a guest make soak-vm.

    run.py PROGRAM RESULTS --hours 0.5 [--device rxe0]

RESULTS gets one line of JSON a seed, as the program prints it, with the commit it is of; beside it,
.json for .jsonl, is what they come to in all. Lazy and eager in turn, where lazy is to be had, and
now and then with huge pages. Ends with the first difference: the program says what it is, and this
how to have it again.
"""

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pytest  # noqa: E402
from memory import free_huge_pages, huge_page_pool  # noqa: E402

import rdmafork  # noqa: E402

SECONDS = 60  # of one seed
THREADS = (2, 4)  # in turn
HUGE = 2  # pages: what is not registered of them each child is given back, which takes a while
POOL = 16  # and as many for what fork() copies, and children write to


def commit():
    """Of this checkout, and whether it was changed since."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


@contextlib.contextmanager
def huge_pages(number, device):
    """How many there may be: some for every ninth run, as the pool is the machine's."""
    with contextlib.ExitStack() as stack:
        have = False
        if device and number % 2:  # a guest's are its own
            have = free_huge_pages() >= POOL
        elif number % 9 == 3:
            with contextlib.suppress(pytest.skip.Exception):
                have = stack.enter_context(huge_page_pool(POOL))
        yield HUGE if have else 0


def run(program, mode, threads, seconds, huge, device):
    """Its output; ends this program where it failed."""
    command = [program, "--seconds", f"{seconds:.1f}", "--mode", mode, "--threads", str(threads)]
    command += ["--seed", str(secrets.randbits(48) + 1), "--huge", str(huge)]
    command += ["--device", device] * bool(device)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"FAILED ({done.returncode}): {' '.join(command)}")
    return json.loads(done.stdout)


def total(results):
    """Sums of the counts; values that are the same in all lines stay."""
    sums = {"runs": len(results)}
    for name, value in results[0].items():
        values = [result[name] for result in results]
        if name in ("kernel", "device", "commit", "whole"):
            sums[name] = value if len(set(values)) == 1 else sorted(set(values))
        elif isinstance(value, dict):
            sums[name] = sum_of(values)
        elif name not in ("seed", "mode", "threads", "huge_pages"):
            sums[name] = round(sum(values), 1)
    for mode in ("lazy", "eager"):
        mine = [result for result in results if result["mode"] == mode]
        sums[mode] = {
            "seconds": round(sum(result["seconds"] for result in mine), 1),
            "forks": sum(result["forks"] + result["clones"] for result in mine),
            "registrations": sum(result["registrations"] for result in mine),
        }
    sums["with_huge_pages"] = sum(result["huge_pages"] > 0 for result in results)
    return sums


def sum_of(values):
    sums = Counter()
    for value in values:
        sums.update(value)
    for name in {"nodes", "abi", "engine_bytes"} & set(sums):  # the kinds, not their number
        sums[name] = max(value[name] for value in values)
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("program")
    parser.add_argument("results", type=Path)
    parser.add_argument("--hours", type=float, required=True)
    parser.add_argument("--device")
    options = parser.parse_args()
    lazy = ["lazy"] if rdmafork.kernel_info().copy_on_fork_trusted else []
    modes = [*lazy, "eager"]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    end, results, of = time.monotonic() + options.hours * 3600, [], commit()
    with open(options.results, "w") as file:
        while not results or (left := end - time.monotonic()) > 1:
            seconds = min(SECONDS, left if results else options.hours * 3600)
            number = len(results)
            mode, threads = modes[number // 2 % len(modes)], THREADS[number % len(THREADS)]
            with huge_pages(number, options.device) as huge:
                # Others wait for the pool.
                seconds /= 4 if huge and not options.device else 1
                result = run(options.program, mode, threads, seconds, huge, options.device)
            results.append({**result, "commit": of})
            print(json.dumps(results[-1]), file=file, flush=True)
    sums = json.dumps(total(results), indent=1)
    options.results.with_suffix(".json").write_text(sums + "\n")
    print(sums)


if __name__ == "__main__":
    main()

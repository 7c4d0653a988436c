"""What does fork() cost a small C process, and what takes its microseconds?

python -m rdmafork.benchmarks.small_process [--quick] [--json FILE] [--plot DIR]

A C program with 1 GiB (--quick: 64 MiB) pinned through io_uring, of base pages or transparent huge
pages, forks again and again; each child ends at once. Nothing but the library is in it, so what the
fork handlers cost is not hidden by a large address space.
The peers: madvise(MADV_DONTFORK) of the memory and no library more (the floor), the same with
librdmafork.so loaded and not used, and the memory as one registration, lazily and eagerly, or
with a partial page at either end where the kernel's copying is not trusted.
The least of all forks: until fork() has returned in the parent, and in the child. Of one fork: the
page faults of either process until then, the process's mappings, the system calls of both, counted
by strace, and the instructions of fork() in either, its handlers among them, counted by callgrind.
"""

import argparse
import random
import re
import subprocess
import tempfile
from pathlib import Path

import rdmafork
from rdmafork import _pins

from . import _compiled, _plots
from ._harness import Document, Measures, Result, Row, main
from ._instructions import CALLGRIND, FOUND, STRACE
from ._measures import rounded
from ._peers import FLOOR, WAYS
from ._progress import Progress
from ._workers import Environment, Skipped, Skips, environment

PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdmafork.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static size_t nbytes;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void pin(void *memory)
{
	char parameters[120] = { 0 }; /* struct io_uring_params */
	struct iovec all = { memory, nbytes };
	long ring = syscall(SYS_io_uring_setup, 1, parameters);

	if (ring < 0 || syscall(SYS_io_uring_register, ring, 0, &all, 1))
		fail("io_uring");
}

#define CALL(name) ((__typeof__(name) *)dlsym(library, #name))

/* How: "none" of it, "load" it, or register with so many bytes of a page left out at both ends. */
static void protect(char *memory, const char *path, const char *how)
{
	void *library = strcmp(how, "none") ? dlopen(path, RTLD_NOW) : NULL;
	struct rf_handle handle;
	struct rf_error error;
	char text[RF_STRERROR_SIZE];
	size_t left_out;
	int rc;

	if (strcmp(how, "none") && !library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	if (!strcmp(how, "none") || !strcmp(how, "load")) {
		if (madvise(memory, nbytes, MADV_DONTFORK))
			fail("madvise");
		return;
	}
	left_out = strtoul(how, NULL, 10);
	rc = CALL(rf_fork_init)(RF_MODE_AUTO, &error);
	if (rc >= 0)
		rc = CALL(rf_register)(memory + left_out, nbytes - 2 * left_out, RF_HELD, RF_OMIT,
				&handle, &error);
	if (rc < 0) {
		CALL(rf_strerror)(rc, &error, text, sizeof(text));
		fprintf(stderr, "%s\n", text);
		exit(1);
	}
}

static unsigned long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static long faults(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_minflt;
}

static int mappings(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	int c, lines = 0;

	while (maps && (c = getc(maps)) != EOF)
		lines += c == '\n';
	return lines;
}

int main(int argc, char **argv)
{
	struct times {
		unsigned long long ns;
		long faults;
	} volatile *child = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	const int forks = atoi(argv[3]);
	long before, parent_faults = 0, child_faults = 0;
	char *memory;
	int i;

	nbytes = strtoul(argv[5], NULL, 10);
	memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || child == MAP_FAILED)
		fail("mmap");
	madvise(memory, nbytes, strcmp(argv[4], "base") ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	memset(memory, 1, nbytes);
	protect(memory, argv[1], argv[2]);
	pin(memory);
	for (i = 0; i < forks; i++) {
		unsigned long long began, ended;
		pid_t pid;

		before = faults();
		began = now();
		pid = fork();
		if (!pid) {
			child->ns = now();
			child->faults = faults();
			_exit(0);
		}
		ended = now();
		if (pid < 0)
			fail("fork");
		parent_faults = faults() - before;
		waitpid(pid, NULL, 0);
		child_faults = child->faults;
		printf("%llu %llu\n", ended - began, child->ns - began);
	}
	printf("%ld %ld %d\n", parent_faults, child_faults, mappings());
	return 0;
}
"""

PARAMETERS = ("pages",)
PAGES = ("base", "transparent huge")
# How it protects the memory, and its environment: no Python is in the program, so no class of
# _peers.py can register there.
PEERS: dict[str, tuple[str, Environment]] = {
    FLOOR: ("none", {}),
    "madvise, rdmafork loaded": ("load", {}),
    "rdmafork lazy": ("0", WAYS["rdmafork lazy"].environment),
    "rdmafork eager": ("0", WAYS["rdmafork eager"].environment),
    "rdmafork whole pages": ("100", WAYS["rdmafork whole pages"].environment),
}
MEASURES: Measures = {
    "fork_us": None,
    "child_us": None,
    "parent_faults": "{:,}".format,
    "child_faults": "{:,}".format,
    "mappings": "{:,}".format,
    "system_calls": "{:,}".format,
    "parent_instructions": "{:,}".format,
    "child_instructions": "{:,}".format,
}
ROUNDS, FORKS = 6, 100
QUICK_ROUNDS, QUICK_FORKS = 1, 20
NBYTES, QUICK_NBYTES = 1 << 30, 64 << 20
# Counted with fewer: system calls and instructions are the same.
COUNTED, COUNTED_NBYTES = 20, 8 << 20


class Program:
    """It, compiled."""

    def __init__(self, directory: str) -> None:
        self._path = _compiled.program(
            directory, PROGRAM, "-I", rdmafork.get_include(), "-ldl"
        )  # fmt: skip

    def run(self, peer: str, pages: str, forks: int, nbytes: int) -> list[list[int]]:
        """A line a fork: until it has returned in the parent, in the child; then the counts."""
        done = self._done(peer, pages, forks, nbytes)
        return [[int(value) for value in line.split()] for line in done.stdout.splitlines()]

    def _done(
        self, peer: str, pages: str, forks: int, nbytes: int, *counter: str
    ) -> subprocess.CompletedProcess[str]:
        how, variables = PEERS[peer]
        numbers = [str(forks), pages, str(nbytes)]
        command = [*counter, self._path, rdmafork.get_library(), how, *numbers]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment(variables)
            )
        except FileNotFoundError:
            raise Skipped(f"{counter[0]} is not installed") from None
        if done.returncode:
            raise Skipped(done.stderr.strip()[-200:] or f"exit status {done.returncode}")
        return done

    def system_calls(self, peer: str, pages: str) -> dict[str, int]:
        """Of a fork, by name, in both processes. Raises Skipped where strace is not to be had."""
        few, many = (self._calls(peer, pages, forks) for forks in (COUNTED, 2 * COUNTED))
        each = {name: round((many[name] - few.get(name, 0)) / COUNTED) for name in many}
        return {name: number for name, number in sorted(each.items()) if number}

    def _calls(self, peer: str, pages: str, forks: int) -> dict[str, int]:
        with tempfile.NamedTemporaryFile("r") as output:
            self._done(peer, pages, forks, COUNTED_NBYTES, *STRACE, "-o", output.name)
            found = re.findall(r"^ *(\d+) (\w+)$", output.read(), re.M)
        return {name: int(number) for number, name in found if name != "total"}

    def instructions(self, peer: str, pages: str) -> tuple[int, int]:
        """Of fork(), in the parent and in the child. Raises Skipped without valgrind.

        A child begins with its parent's count, and ends before its parent does.
        """
        (_, parent_first), (*_, child, parent) = (
            self._collected(peer, pages, forks) for forks in (1, 2)
        )
        return parent - parent_first, child - parent_first

    def _collected(self, peer: str, pages: str, forks: int) -> list[int]:
        callgrind = [*CALLGRIND, "--toggle-collect=fork"]
        done = self._done(peer, pages, forks, COUNTED_NBYTES, *callgrind)
        found = re.findall(FOUND["valgrind"], done.stderr)
        if len(found) != forks + 1:
            raise Skipped("valgrind counts no instructions here")
        return [int(number) for number in found]


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rounds, forks = (QUICK_ROUNDS, QUICK_FORKS) if options.quick else (ROUNDS, FORKS)
    nbytes = QUICK_NBYTES if options.quick else NBYTES
    skipped: Skips = []
    rows: list[Row] = []
    no_pins = _pins.unavailable()
    if no_pins:
        return Result(rounds, [], [{"line": "all", "reason": f"nothing can be pinned: {no_pins}"}])
    with tempfile.TemporaryDirectory() as directory:
        try:
            program = Program(directory)
        except Skipped as reason:
            return Result(rounds, [], [{"line": "all", "reason": str(reason)}])
        for i, pages in enumerate(PAGES):
            found: dict[str, list[list[list[int]]]] = {}
            for done in range(rounds):
                progress((i + done / rounds) / len(PAGES), f"{forks} forks each, {pages} pages")
                for peer in random.Random(done).sample(list(PEERS), len(PEERS)):
                    try:
                        found.setdefault(peer, []).append(program.run(peer, pages, forks, nbytes))
                    except Skipped as reason:
                        skip = {"line": peer, "pages": pages, "reason": str(reason)}
                        skipped += [skip] * (skip not in skipped)
            rows += [row_of(peer, pages, found[peer]) for peer in PEERS if peer in found]
        for counting, count in COUNTINGS.items():
            try:
                for row in rows:
                    count(program, row)
            except Skipped as reason:
                skipped.append({"line": "all", "counting": counting, "reason": str(reason)})
    return Result(rounds, rows, skipped)


def count_calls(program: Program, row: Row) -> None:
    calls = program.system_calls(row["line"], row["pages"])
    row["system_calls"], row["calls"] = sum(calls.values()), calls


def count_instructions(program: Program, row: Row) -> None:
    here, there = program.instructions(row["line"], row["pages"])
    row["parent_instructions"], row["child_instructions"] = here, there


COUNTINGS = {"system_calls": count_calls, "instructions": count_instructions}


def row_of(peer: str, pages: str, runs: list[list[list[int]]]) -> Row:
    """The least of all times: the rest is other programs' time."""
    times = [fork for run in runs for fork in run[:-1]]
    parent, child, mappings = runs[-1][-1]
    here, there = (rounded(min(each) / 1e3) for each in zip(*times, strict=True))
    return {
        "line": peer,
        "pages": pages,
        "fork_us": {"median": here, "quartiles": [here, here]},
        "child_us": {"median": there, "quartiles": [there, there]},
        "parent_faults": parent,
        "child_faults": child,
        "mappings": mappings,
    }


def plot(document: Document, directory: Path) -> list[Path]:
    """A bar a peer, of base pages."""
    rows = [row for row in document["rows"] if row["pages"] == PAGES[0]][::-1]
    path = directory / "small_process.svg"
    with _plots.bars(path, document, len(rows)) as axis:
        peers = [row["line"] for row in rows]
        there = [row["child_us"]["median"] for row in rows]
        here = [row["fork_us"]["median"] for row in rows]
        axis.barh(peers, there, height=0.6, color="#BBBBBB", label="in the child")
        axis.barh(peers, here, height=0.3, color="#0072B2", label="in the parent")
        axis.legend(loc="upper right")
        axis.set_xlabel("us until fork() has returned, 1 GiB registered and pinned")
    return [path]


if __name__ == "__main__":
    raise SystemExit(main("small_process"))

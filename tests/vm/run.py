"""The tests in virtual machines with a soft-RoCE device, on stock Debian kernels: make test-vm.

The guest has this machine's files for its own, so the same checkout and the same virtual
environment run there; guest.sh is what it does. Kernels are fetched with apt from the suites
below, unpacked in build/vm/kernels and never installed. Needs root only to install packages.

    run.py 5.10 6.1 6.12        PYTEST_ARGS='tests/vm/test_x.py -k y' chooses tests
"""

import concurrent.futures
import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/tools"))

from debian import Apt, NotThere, install_packages  # noqa: E402

VM = ROOT / "build" / "vm"
KERNELS = VM / "kernels"
SUITES = ("bullseye", "bookworm", "trixie", "trixie-backports")
PACKAGES = (
    "busybox-static debian-archive-keyring g++ gcc ibverbs-providers ibverbs-utils iproute2 kmod "
    "libc6-dev libfabric-bin libgloo-dev libibverbs-dev librdmacm1 openmpi-bin patchelf perftest "
    "python3-mpi4py python3-pyverbs qemu-system-x86 rdma-core strace ucx-utils util-linux valgrind "
    "xz-utils zstd"
).split()
MEMORY = "2500M"
MINUTES = float(os.environ.get("VM_MINUTES", "75"))  # a guest that takes longer hangs
OPTIONS = shlex.split(os.environ.get("VM_OPTIONS", ""))  # more of vng's
# What udev finds for the machine that qemu is, and no test needs: emulated, loading it takes as
# long as all else before the tests.
NEEDLESS = (
    "kvm_amd kvm_intel kvm powernow_k8 aesni_intel ghash_clmulni_intel cryptd iTCO_wdt "
    "iTCO_vendor_support i6300esb lpc_ich i2c_i801 ahci libahci sr_mod cdrom sg psmouse pcspkr "
    "evdev button qemu_fw_cfg"
).split()
QUIET = 60  # seconds, before it is said that a guest is still running
PROGRESS = re.compile(r"== |tests/\S+\.py |ok |FAILED |guest: |=+ .* in [0-9.]+s")

screen = threading.Lock()


class NotTested(Exception):
    """Why a kernel could not be tested."""


class Interrupted(Exception):
    pass


class Kernel(NamedTuple):
    series: str
    release: str
    image: Path


class Result(NamedTuple):
    name: str
    passed: bool | None  # None: not tested
    text: str


def say(name, text):
    with screen:
        print(f"{name + ':':6} {text}", flush=True)


# ---- kernels ----------------------------------------------------------------------------


def release_order(release):
    return [int(number) for number in re.findall(r"\d+", release)]


def here(series):
    """The newest kernel of a series that is unpacked, or None."""
    found = [
        path
        for path in KERNELS.glob(f"{series}.*/boot/vmlinuz-*")
        if (path.parents[1] / "complete").exists()
    ]
    if not found:
        return None
    image = max(found, key=lambda path: release_order(path.name))
    return Kernel(series, image.name.removeprefix("vmlinuz-"), image)


class Kernels(Apt):
    """Where they are fetched from."""

    def newest(self, series):
        names = self.run("apt-cache", "pkgnames", f"linux-image-{series}.").stdout.split()
        fitting = [
            name
            for name in names
            if re.fullmatch(r"linux-image-[0-9][^-]*(-[0-9][^-]*)?-amd64", name)
        ]
        if not fitting:
            errors = f" ({self.errors})" if self.errors else ""
            raise NotTested(f"no linux-image-{series}.* in {', '.join(self.suites)}{errors}")
        return max(fitting, key=release_order)

    def unpack(self, package):
        release = package.removeprefix("linux-image-")
        folder = KERNELS / release
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # From 7 on the image is a package of its own, and its modules are another.
        wanted = [
            name
            for name in (f"linux-binary-{release}", f"linux-modules-{release}")
            if self.run("apt-cache", "pkgnames", name).stdout
        ]
        done = self.run("apt-get", "-qq", "download", *(wanted or [package]), cwd=folder)
        debs = list(folder.glob("*.deb"))
        if done.returncode or not debs:
            raise NotTested(f"{package} cannot be downloaded: {done.stderr.strip()[-200:]}")
        for deb in debs:
            subprocess.run(["dpkg", "-x", deb, folder], check=True)
            deb.unlink()
        if not (folder / "lib").exists():
            (folder / "lib").symlink_to("usr/lib")
        if not (folder / "boot").exists():
            (folder / "boot").mkdir()
            image = folder / "lib/modules" / release / "vmlinuz"
            (folder / "boot" / f"vmlinuz-{release}").symlink_to(image)
        subprocess.run(["depmod", "-b", folder, release], check=True)
        (folder / "complete").touch()


def fetch(wanted):
    """A Kernel, or why there is none, for each series."""
    kernels, apt = {}, None
    for series in wanted:
        kernels[series] = here(series)
        try:
            if not kernels[series]:
                if not apt:
                    apt = Kernels(VM / "apt", SUITES)
                    apt.update()
                package = apt.newest(series)
                say(series, f"downloading {package}")
                apt.unpack(package)
                kernels[series] = here(series)
        except (NotTested, NotThere, OSError, subprocess.CalledProcessError) as error:
            kernels[series] = NotTested(error)
    return kernels


# ---- one guest --------------------------------------------------------------------------

guests = set()


def command(kernel, results):
    script = shlex.join(["bash", str(ROOT / "tests/vm/guest.sh"), str(ROOT), str(results)])
    files = "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap"
    return [
        *["vng", "--disable-kvm", "--force-9p", "--disable-monitor", "-r", str(kernel.image)],
        *["--memory", MEMORY, "--cpus", "1", "--rwdir", str(results), *OPTIONS],
        *["--append", "mitigations=off", "--append", "loglevel=5"],
        *["--append", f"modprobe.blacklist={','.join(NEEDLESS)}", "--exec", script],
        # Once more what the guest has for its root, which it is to mount with a cache.
        f"--qemu-opts=-fsdev {files} -device virtio-9p-pci,fsdev=files,mount_tag=files",
    ]


def start(kernel, results):
    path = f"{ROOT}/.venv/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
    with open(results / "console.log", "wb") as console:
        return subprocess.Popen(
            command(kernel, results),
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=console,
            start_new_session=True,
        )


def end(process):
    """qemu too, which is in the same group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def follow(name, process, log, deadline):
    """Write the guest's output to log, and show its progress; False where time is up."""
    began, line, spoken = time.monotonic(), b"", time.monotonic()
    while (now := time.monotonic()) < deadline:
        if now - spoken > QUIET:
            spoken = now
            running = line.decode(errors="replace").strip()[-60:]
            say(name, f"{now - began:.0f} s, running{': ' * bool(running)}{running}")
        if not select.select([process.stdout], [], [], 1)[0]:
            continue
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return True
        log.write(piece)
        log.flush()
        *lines, line = (line + piece).split(b"\n")
        for text in (one.decode(errors="replace").rstrip() for one in lines):
            if PROGRESS.match(text):
                spoken = now
                say(name, " ".join(text.split()))
    return False


def run_guest(kernel, arguments):
    results = VM / kernel.series
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    (results / "arguments").write_text(arguments)
    say(kernel.series, f"booting {kernel.release}")
    began = time.monotonic()
    process = start(kernel, results)
    guests.add(process)
    try:
        with open(results / "guest.log", "wb") as log:
            in_time = follow(kernel.series, process, log, began + MINUTES * 60)
    finally:
        end(process)
        guests.discard(process)
    problem = None
    if not in_time:
        problem = f"no end in {MINUTES:g} minutes"
    elif not (results / "end").exists():
        problem = "the guest died, or never ran the tests"
    return judge(kernel.series, results, time.monotonic() - began, problem, kernel.release)


# ---- results ----------------------------------------------------------------------------


def write_program_results(results):
    """The output of the C programs, as JUnit has it."""
    suite = ElementTree.Element("testsuite", name="c")
    for log in sorted((results / "c").glob("*.log")):
        said, told = "", 0
        for line in log.read_text(errors="replace").splitlines():
            scenario = re.match(r"(ok|skip|FAILED) +(.*) ([0-9.]+)s", line)
            if scenario:
                status, name, seconds = scenario.groups()
                case = ElementTree.SubElement(
                    suite, "testcase", classname=f"c.{log.stem}", name=name, time=seconds
                )
                if status != "ok":
                    kind = "skipped" if status == "skip" else "failure"
                    message = re.sub(r"^.*?: (skipped: )?", "", said.strip())
                    ElementTree.SubElement(case, kind, message=message).text = said
                told += status == "FAILED"
                said = ""
            elif not line.startswith(("SEED=", "exit status")):
                said += line + "\n"
        if not told and not log.read_text(errors="replace").endswith("exit status 0\n"):
            case = ElementTree.SubElement(suite, "testcase", classname="c", name=log.stem)
            ElementTree.SubElement(case, "failure", message="it ended badly").text = said
    if len(suite):
        ElementTree.ElementTree(suite).write(results / "c.xml")


def cases(results):
    """(name, None | "skipped" | "failure" | "error", message) of every test."""
    for path in sorted(results.glob("*.xml")):
        try:
            tree = ElementTree.parse(path)
        except ElementTree.ParseError:
            yield path.name, "error", "half-written"
            continue
        for case in tree.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            outcome = next(
                (one for one in case if one.tag in ("failure", "error", "skipped")), None
            )
            if outcome is None:
                yield name, None, ""
            else:
                yield name, outcome.tag, outcome.get("message") or ""


def tail(path, lines):
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def judge(name, results, seconds, problem, what):
    write_program_results(results)
    found = list(cases(results))
    bad = [test for test, kind, _ in found if kind in ("failure", "error")]
    skipped = [(test, why) for test, kind, why in found if kind == "skipped"]
    passed = len(found) - len(bad) - len(skipped)
    statuses = [path.read_text().strip() for path in results.glob("*.status")]
    if not problem and not bad and any(status != "0" for status in statuses):
        problem = "pytest ended with exit status " + ", ".join(sorted(set(statuses) - {"0"}))
    if not problem and not passed:
        problem = "no test has run"
    show(name, results, problem, bad, skipped)
    counts = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    word = "FAILED" if problem or bad else "passed"
    reason = f": {problem}" if problem else ""
    where = results.relative_to(ROOT)
    text = f"{word}{reason}: {counts} in {seconds / 60:.1f} min, {what}, {where}"
    return Result(name, word == "passed", text)


def show(name, results, problem, bad, skipped):
    for why in sorted({why for _, why in skipped}):
        tests = [test for test, reason in skipped if reason == why]
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        say(name, f"skipped {tests[0]}{more}: {why}")
    for test in bad:
        say(name, f"FAILED {test}")
    if problem or bad:
        for log in ["guest.log"] + ["console.log"] * bool(problem):
            say(name, f"the end of {(results / log).relative_to(ROOT)}:")
            for line in tail(results / log, 40):
                say(name, f"    {line}")


def run_host(arguments):
    """Where this machine has a device itself."""
    results = VM / "host"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    chosen = shlex.split(arguments) or ["tests/vm"]
    began = time.monotonic()
    xml = f"--junit-xml={results}/device.xml"
    with open(results / "guest.log", "wb") as log:
        done = subprocess.run(
            [f"{ROOT}/.venv/bin/python", "-m", "pytest", xml, *chosen],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    (results / "device.status").write_text(str(done.returncode))
    return judge("host", results, time.monotonic() - began, None, os.uname().release)


def has_device():
    with contextlib.suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


# ---- all of them ------------------------------------------------------------------------


def interrupt(*_):
    raise Interrupted


def run_guests(kernels, arguments):
    """Side by side, as many as there are processors: a guest has one. No more than two."""
    side = min(2, len(os.sched_getaffinity(0)))
    pool = concurrent.futures.ThreadPoolExecutor(side)
    try:
        waiting = [pool.submit(run_guest, kernel, arguments) for kernel in kernels]
        return [one.result() for one in waiting]
    finally:
        # After an interruption nothing is to go on.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(guests):
            end(process)


def report(results):
    """One line a kernel; then the tests that were not run."""
    print()
    for result in results:
        if result.passed is not None:
            say(result.name, result.text)
    untested = [f"{result.name} ({result.text})" for result in results if result.passed is None]
    if untested:
        print(f"not tested: {'; '.join(untested)}", flush=True)
    tested = any(result.passed is not None for result in results if result.name != "host")
    return int(not tested or any(result.passed is False for result in results))


def main(wanted):
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    arguments = os.environ.get("PYTEST_ARGS", "").strip()
    try:
        install_packages(PACKAGES, "test-vm")
        kernels = fetch(wanted)
        found = {s: kernel for s, kernel in kernels.items() if isinstance(kernel, Kernel)}
        results = dict(zip(found, run_guests(found.values(), arguments), strict=True))
        for series, why in kernels.items():
            results.setdefault(series, Result(series, None, str(why)))
        if has_device():
            results["host"] = run_host(arguments)
    except Interrupted:
        print("interrupted", file=sys.stderr)
        os._exit(130)
    return report(results.values())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("run.py SERIES..., for example: run.py 5.10 6.1 6.12")
    sys.exit(main(list(dict.fromkeys(sys.argv[1:]))))

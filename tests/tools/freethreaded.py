"""A CPython without the GIL, built from Debian's source package: make test-freethreaded.

    freethreaded.py 3.13    into build/freethreaded/3.13, where it stays for the next run

The newest of that series that can be had, of any suite below, with assertions: no distribution
has packages of it. Needs root only to install packages.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from debian import Apt, NotThere, install_packages

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "freethreaded"
SUITES = ("trixie", "forky", "sid")
PACKAGES = (
    "debian-archive-keyring gcc libbz2-dev libffi-dev liblzma-dev libsqlite3-dev libssl-dev make "
    "xz-utils zlib1g-dev"
).split()
# Compiling takes as long as all the tests: no optimization that takes time.
CONFIGURE = "-q --disable-gil --disable-test-modules --with-assertions --with-ensurepip=install"


def versions(apt, package):
    """The newest first."""
    shown = apt.run("apt-cache", "showsrc", package).stdout
    found = set(re.findall(r"^Version: (\S+)$", shown, re.M))
    if not found:
        raise NotThere(f"no {package} in {', '.join(SUITES)} ({apt.errors or 'nor an error'})")
    return sorted(found, key=lambda one: [int(n) for n in re.findall(r"\d+", one)], reverse=True)


def fetch(series, folder):
    """The directory of its source. A mirror may list more than it has."""
    package, refused = f"python{series}", []
    apt = Apt(FOLDER / "apt", SUITES, "deb-src")
    apt.update()
    for version in versions(apt, package):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = ["-qq", "source", "--tar-only", "--only-source"]
        done = apt.run("apt-get", *options, f"{package}={version}", cwd=folder)
        archives = list(folder.glob("*.orig.tar.*z"))
        if archives and not done.returncode:
            print(f"building {package} {version} without the GIL", flush=True)
            subprocess.run(["tar", "-xf", archives[0], "-C", folder], check=True)
            return next(path for path in folder.iterdir() if path.is_dir())
        refused.append(f"{version}: {done.stderr.strip().splitlines()[0:1]}")
    raise NotThere(f"{package} cannot be downloaded: {'; '.join(refused)}")


def build(series):
    target = FOLDER / series
    source = fetch(series, FOLDER / "source")
    cores = len(os.sched_getaffinity(0))
    with open(FOLDER / "build.log", "wb") as log:
        for command in (
            ["./configure", f"--prefix={target}", *CONFIGURE.split(), "OPT=-O1 -Wall"],
            ["make", "-s", f"-j{cores}"],
            ["make", "-s", "install"],
        ):
            # Variables of make test-freethreaded are not for this make.
            environment = {n: v for n, v in os.environ.items() if not n.startswith("MAKE")}
            done = subprocess.run(
                command, cwd=source, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            if done.returncode:
                sys.exit(f"{command[0]} failed: see {log.name}")
    shutil.rmtree(FOLDER / "source")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("freethreaded.py SERIES, for example: freethreaded.py 3.13")
    install_packages(PACKAGES, "test-freethreaded")
    try:
        build(sys.argv[1])
    except NotThere as error:
        sys.exit(f"make test-freethreaded: {error}")

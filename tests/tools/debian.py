"""Debian's archive for the tests: packages to install, and apt for other suites."""

import os
import re
import shlex
import subprocess
import sys

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class NotThere(Exception):
    """A package or suite that cannot be had, and why."""


def missing_packages(packages, target):
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        sys.exit(f"make {target} needs Debian's apt and dpkg")
    return [package for package in packages if f"{package} installed" not in answer]


def install_packages(packages, target):
    """Install the missing ones, or end with the command that does."""
    missing = missing_packages(packages, target)
    if not missing:
        return
    install = ["apt-get", "-qq", "install", "--no-install-recommends", *missing]
    if os.geteuid():
        sys.exit(f"make {target} needs packages, as root: {shlex.join(install)}")
    print(f"apt:   installing {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], env=environment)
    done = subprocess.run(install, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"make {target}: apt-get could not install {' '.join(missing)}")


class Apt:
    """apt with sources and lists of its own: this machine's stay as they are.

    kind: "deb" for packages of amd64, "deb-src" for sources.
    """

    def __init__(self, folder, suites, kind="deb"):
        self.folder = folder
        self.suites = suites
        self.kind = kind
        self.errors = ""
        for name in ("lists/partial", "cache/archives/partial", "parts"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        (self.folder / "sources.list").write_text("".join(map(self.source, self.places())))
        settings = {
            "Dir::Etc::sourcelist": "sources.list",
            "Dir::Etc::sourceparts": "parts",
            "Dir::Etc::preferencesparts": "parts",
            "Dir::State::lists": "lists",
            "Dir::State::status": "status",
            "Dir::Cache": "cache",
        }
        lines = [f'{key} "{self.folder / value}";\n' for key, value in settings.items()]
        lines.append('APT::Sandbox::User "root";\nAcquire::Languages "none";\n')
        (self.folder / "apt.conf").write_text("".join(lines))

    def places(self):
        """(address, suite): all suites, security too, at the mirrors this machine uses."""
        uris = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            capture_output=True,
            text=True,
        ).stdout.split()
        mirrors = sorted({uri for uri in uris if re.search(r"/debian(-security)?/?$", uri)})
        if not mirrors:
            raise NotThere("apt here has no Debian mirror")
        for mirror in mirrors:
            for suite in self.suites:
                yield mirror, suite + "-security" * ("-security" in mirror)

    def source(self, place):
        arch = "arch=amd64 " * (self.kind == "deb")
        return f"{self.kind} [{arch}signed-by={KEYRING}] {place[0]} {place[1]} main\n"

    def run(self, *command, cwd=None):
        environment = {**os.environ, "APT_CONFIG": str(self.folder / "apt.conf")}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    def update(self):
        """Each suite that is there counts: one that has left the mirror is no error yet."""
        done = self.run("apt-get", "-qq", "update")
        self.errors = next(iter(done.stderr.splitlines()), "")

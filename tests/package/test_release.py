"""`make release-check` finds these faults before a tag is pushed, which publishes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import environment

CHECK = Path(__file__).resolve().parents[2] / ".ci" / "release-check"
CHANGELOG = """
## [Unreleased]

## [0.10.0] - 2026-01-31

### Added

- Something.

## [0.9.0] - 2025-12-31

### Added

- The first.
"""
HEADER = """
#define RDMAFORK_VERSION_MAJOR 0
#define RDMAFORK_VERSION_MINOR 10
#define RDMAFORK_VERSION_PATCH 0
"""
# As setuptools-scm: by the tag of the commit.
MAKEFILE = """
wheel:
	mkdir dist
	version=$$(git describe --tags | sed s/^v//); \\
		touch dist/rdmafork-$$version.tar.gz dist/rdmafork-$$version-cp311-cp311-linux.whl
"""
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    **{
        f"GIT_{who}_{what}": f"tests@{who.lower()}.invalid"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@pytest.fixture
def project(tmp_path):
    """One that is ready to become 0.10.0, after 0.9.0."""
    run = Project(tmp_path / "project")
    run.git("init", "-q")
    run.commit("Makefile", MAKEFILE)
    run.git("tag", "v0.9.0")
    run.commit(".gitignore", "/dist/\n/build/\n")
    run.commit("csrc/rdmafork.h", HEADER)
    run.commit("rdmafork/pkgconfig/rdmafork.pc", "Name: rdmafork\nVersion: 0.10.0\n")
    run.commit("CHANGELOG.md", CHANGELOG)
    return run


class Project:
    def __init__(self, folder):
        self.folder = folder
        (folder / ".ci").mkdir(parents=True)
        shutil.copy(CHECK, folder / ".ci")

    def run(self, *command):
        return subprocess.run(
            command, cwd=self.folder, env=environment(GIT), capture_output=True, text=True
        )

    def git(self, *arguments):
        done = self.run("git", *arguments)
        assert done.returncode == 0, done.stderr

    def commit(self, name, text):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", name)

    def check(self, version="0.10.0"):
        """The faults that it names."""
        done = self.run(".ci/release-check", version)
        wrong = re.findall(r"^FAILED  (.*)$", done.stdout, re.M)
        assert done.returncode == bool(wrong), done.stdout + done.stderr
        assert len(re.findall(r"^ok  ", done.stdout, re.M)) + len(wrong) == 10
        assert ("git push origin v0.10.0" in done.stdout) == (not wrong)
        return wrong


@pytest.mark.parametrize("tagged", [False, True])
def test_a_ready_release_is_built_from_the_commit(project, tagged):
    if tagged:
        project.git("tag", "v0.10.0")
    assert project.check() == []
    assert {path.name for path in (project.folder / "dist").iterdir()} == {
        "rdmafork-0.10.0.tar.gz",
        "rdmafork-0.10.0-cp311-cp311-linux.whl",
    }
    assert project.run("git", "tag").stdout.split() == ["v0.10.0"] * tagged + ["v0.9.0"]


def test_uncommitted_changes_are_found(project):
    (project.folder / "forgotten.c").touch()
    assert project.check() == ["nothing is changed or forgotten here"]


def test_a_tag_elsewhere_is_found(project):
    project.git("tag", "v0.10.0", "HEAD~1")
    assert project.check() == ["v0.10.0 is no tag yet, or is this commit's"]


def test_a_lower_version_is_found(project):
    project.git("tag", "v0.11.0", "HEAD~1")
    assert project.check() == ["it is higher than the last one"]


@pytest.mark.parametrize(
    "line, instead, found",
    [
        ("## [0.10.0] - 2026-01-31", "## [0.10.0]", "CHANGELOG.md has it, with its date"),
        ("- Something.\n", "", "something is said of it there"),
        ("[Unreleased]", "[Unreleased]\n\n- More.", "nothing waits under Unreleased"),
    ],
)
def test_a_changelog_that_is_not_ready_is_found(project, line, instead, found):
    text = CHANGELOG.replace(line, instead)
    project.commit("CHANGELOG.md", text.replace("### Added\n\n\n", ""))
    assert project.check() == [found]


def test_a_header_of_another_version_is_found(project):
    project.commit("csrc/rdmafork.h", HEADER.replace("PATCH 0", "PATCH 1"))
    project.commit("rdmafork/pkgconfig/rdmafork.pc", "Version: 0.9.0\n")
    assert project.check() == ["rdmafork.h has it", "rdmafork.pc has it"]


def test_a_failed_build_is_found_with_the_reason(project):
    project.commit("Makefile", "wheel:\n\t@echo no compiler; false\n")
    done = project.run(".ci/release-check", "0.10.0")
    assert done.returncode == 1
    assert re.search(r"^FAILED  the wheel is built\n +.*^ +no compiler$", done.stdout, re.M | re.S)


@pytest.mark.parametrize("version", ["", "v0.10.0", "0.10", "0.10.0rc1"])
def test_no_other_form_of_a_version_is_taken(project, version):
    done = project.run(".ci/release-check", version)
    assert done.returncode == 2 and "which version" in done.stderr

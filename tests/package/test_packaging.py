"""packaging/: the recipes ask for what pyproject.toml does; an archive knows its version."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TO_BUILD = re.findall(
    r'"([\w-]+)>=([\d.]+)"', re.search(r"^requires = \[.*\]$", PYPROJECT, re.M).group()
)
TO_TEST = re.findall(r'"([\w-]+)>=', re.search(r"^test = \[.*\]$", PYPROJECT, re.M).group())


def recipe(path):
    return (ROOT / "packaging" / path).read_text()


def test_recipes_build_with_the_project_s_requirements():
    assert len(TO_BUILD) == 3
    for name, version in TO_BUILD:
        debian = "cython3" if name == "Cython" else f"python3-{name}"
        assert f"\n {debian} (>= {version}),\n" in recipe("debian/control")
        assert f"\n    - {name.lower()} >={version}\n" in recipe("conda/recipe.yaml")
        assert f'depends_on("py-{name.lower()}@{version}:", type="build")' in recipe(
            "spack/package.py"
        )
    oldest = re.search(r'requires-python = ">=(.*)"', PYPROJECT).group(1)
    assert f'depends_on("python@{oldest}:"' in recipe("spack/package.py")


def test_recipes_test_with_the_project_s_requirements():
    for name in set(TO_TEST) - {"pytest-xdist"}:
        assert f"\n python3-{name} <!nocheck>,\n" in recipe("debian/control")
        assert f"\n        - {name}\n" in recipe("conda/recipe.yaml")


def test_an_archive_of_a_tag_has_its_version(tmp_path):
    if not shutil.which("git") or not (ROOT / ".gitattributes").is_file():
        pytest.skip("needs git, and a checkout")
    if not importlib.util.find_spec("setuptools_scm"):
        pytest.skip("needs setuptools-scm")

    def run(*command, cwd):
        env = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        done = subprocess.run(
            command, cwd=cwd, env=environment(env), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    project, archive = tmp_path / "project", tmp_path / "archive"
    (project / "rdmafork").mkdir(parents=True)
    for name in (".gitattributes", ".git_archival.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    (project / "rdmafork" / "__init__.py").touch()
    run("git", "init", "-q", cwd=project)
    run("git", "add", "-A", cwd=project)
    me = ("-c", "user.name=tests", "-c", "user.email=tests@tests.invalid")
    run("git", *me, "commit", "-qm", "all", cwd=project)
    run("git", *me, "tag", "-am", "a release", "v1.2.3", cwd=project)
    run("git", "archive", "-o", tmp_path / "archive.tar", "HEAD", cwd=project)
    archive.mkdir()
    run("tar", "-xf", tmp_path / "archive.tar", cwd=archive)
    printed = run(sys.executable, "-m", "setuptools_scm", cwd=archive)
    assert printed.split()[-1] == "1.2.3"

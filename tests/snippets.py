"""The code blocks of README and the documentation, and how each is run.

    python      a whole program, in a fresh interpreter, warnings are errors
    console     each line after "$ ", in a shell, with this installation first in PATH
    cmake       is CMakeLists.txt for the console blocks of its page
    c           a whole program is compiled, linked and run; else its lines are csrc's own
    text        after one of these, what it prints ("..." is anything); else a drawing, or what a
                terminal showed

A comment before a block says what it needs that not every machine has, or why it is not run:

    <!-- run: device -->        <!-- not run: there is no container engine here -->
"""

import contextlib
import ctypes.util
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import SLOWNESS, environment
from memory import huge_page_pool, pool_lock
from mpi import AS_ROOT, FEW_PROCESSORS

import rdmafork

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEBIAN = "/usr/lib/python3/dist-packages"  # has pyverbs
DEVICE = "mlx5_0"  # the name that the pages use
TIMEOUT = 60 * SLOWNESS

FENCE = re.compile(
    r"(?:^<!-- (?P<word>run|not run): (?P<about>[^\n]*) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    needs: str | None
    why_not: str | None
    prints: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(page: Path, name: str) -> Iterator[Snippet]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for number, match in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else None
        follows = (
            after is not None
            and after["language"] == "text"
            and not text[match.end() : after.start("fence")].strip()
        )
        yield Snippet(
            name,
            text.count("\n", 0, match.start("fence")) + 1,
            match["language"].strip(),
            match["code"],
            match["about"] if match["word"] == "run" else None,
            match["about"] if match["word"] == "not run" else None,
            after["code"] if follows and after else None,
        )


def all_snippets() -> list[Snippet]:
    return [s for page in PAGES for s in snippets_of(page, str(page.relative_to(ROOT)))]


# ---- needs of a block -------------------------------------------------------------------


def first_device() -> str | None:
    try:
        devices = rdmafork.get_device_list()
    except OSError:
        return None
    return devices[0].name if devices else None


def lacks_device() -> str | None:
    return None if first_device() else "no RDMA device here; make test-vm has one"


def lacks_pyverbs() -> str | None:
    if sys.version_info[:2] != (3, 11) or not Path(DEBIAN, "pyverbs").is_dir():
        return "no pyverbs here (Debian: python3-pyverbs, CPython 3.11)"
    return lacks_device()


def lacks_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def lacks_libibverbs() -> str | None:
    return None if ctypes.util.find_library("ibverbs") else "libibverbs is not installed"


def lacks_mpirun() -> str | None:
    return None if shutil.which("mpirun", path=search_path()) else "no mpirun here (extra [mpi])"


def lacks_trusted_copying() -> str | None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "what is printed has ends to be copied; without the GIL buffers have whole pages"
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    return None if trusted else "what is printed is for kernels whose copying can be trusted"


def lacks_tool(name: str) -> str | None:
    return None if shutil.which(name) else f"{name} is not installed"


NEEDS = {
    "cmake": lambda: lacks_tool("cmake") or lacks_tool("pkg-config"),
    "pkg-config": lambda: lacks_tool("pkg-config"),
    "device": lacks_device,
    "huge pages": lambda: None,  # reserved, or else skipped
    "libibverbs": lacks_libibverbs,
    "mpi4py": lambda: lacks_module("mpi4py") or lacks_libibverbs(),
    "mpirun": lacks_mpirun,
    "pyverbs": lacks_pyverbs,
    "trusted copying": lacks_trusted_copying,
    "torch": lambda: lacks_module("torch"),
}
TALKATIVE = ("mpi4py", "pyverbs", "torch")  # others' libraries may print anything


# ---- running them -----------------------------------------------------------------------


def search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def lines_that_match(printed: str, shown: str) -> bool:
    """ "..." is anything, and columns may be as wide as they are."""
    words = " ".join(shown.split())
    pattern = ".*".join(re.escape(part) for part in words.split("..."))
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def execute(command: list[str], snippet: Snippet, tmp_path: Path) -> str:
    env = {"PATH": search_path(), "COLUMNS": "80", "LD_LIBRARY_PATH": None}
    done = subprocess.run(
        command,
        env=environment(env | AS_ROOT | FEW_PROCESSORS),
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    # What doctor finds on this machine is no matter of the page.
    fine = (0, 1) if "rdmafork doctor" in command[-1] else (0,)
    assert done.returncode in fine, f"{snippet}: {done.stdout}{done.stderr}"
    if snippet.language == "python" and snippet.needs not in TALKATIVE:
        assert done.stderr == "", f"{snippet}: {done.stderr}"
    return done.stdout


def run_python(snippet: Snippet, tmp_path: Path) -> None:
    code = snippet.code.replace(DEVICE, first_device() or DEVICE)
    if snippet.needs == "pyverbs":
        code = f"import sys; sys.path.append({DEBIAN!r})\n{code}"
    printed = execute([sys.executable, "-W", "error", "-c", code], snippet, tmp_path)
    if snippet.prints is not None:
        assert lines_that_match(printed, snippet.prints), f"{snippet} prints\n{printed}"


def run_console(snippet: Snippet, tmp_path: Path) -> None:
    for part in re.split(r"^\$ ", snippet.code, flags=re.MULTILINE)[1:]:
        command, *rest = part.replace("\\\n", " ").split("\n", 1)
        shown = rest[0] if rest else ""
        if "examples/" in command and not (tmp_path / "examples").exists():
            (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a checkout
        if "app.c" in command or "cmake" in command:
            block_of(snippet, "c", "main(", tmp_path / "app.c")
        if "cmake" in command:
            block_of(snippet, "cmake", "", tmp_path / "CMakeLists.txt")
        # A demo takes free huge pages, which another test may count on.
        with pool_lock() if "rdmafork demo" in command else contextlib.nullcontext():
            printed = execute(["sh", "-c", command], snippet, tmp_path)
        if shown.strip():
            assert lines_that_match(printed, shown), f"{snippet}: $ {command} prints\n{printed}"


def block_of(snippet: Snippet, language: str, word: str, path: Path) -> None:
    """The one block of the same page in that language that has the word, as a file."""
    page = snippets_of(ROOT / snippet.page, "")
    (found,) = [s for s in page if s.language == language and word in s.code]
    path.write_text(found.code)


def run_cmake(snippet: Snippet, tmp_path: Path) -> None:
    page = snippets_of(ROOT / snippet.page, "")
    assert [s for s in page if s.language == "console" and s.needs == "cmake"]


def run_c(snippet: Snippet, tmp_path: Path) -> None:
    if "main(" not in snippet.code:
        lines = {
            " ".join(line.split()) for f in (ROOT / "csrc").rglob("*.[ch]") for line in open(f)
        }
        for line in snippet.code.splitlines():
            assert " ".join(line.split()) in lines, f"{snippet}: not in csrc: {line}"
        return
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        pytest.skip(f"no C compiler ({compiler[0]})")
    source, program, library = tmp_path / "app.c", tmp_path / "app", rdmafork.get_library()
    source.write_text(snippet.code)
    flags = ["-Wall", "-Wextra", "-Werror", "-I", rdmafork.get_include(), "-o", str(program)]
    flags += [str(source), library, f"-Wl,-rpath,{Path(library).parent}"]
    execute([*compiler, *flags], snippet, tmp_path)
    execute([str(program)], snippet, tmp_path)


def check(snippet: Snippet, tmp_path: Path) -> None:
    if snippet.why_not is not None:
        pytest.skip(snippet.why_not)
    if snippet.needs is not None:
        lacking = NEEDS[snippet.needs]()
        if lacking:
            pytest.skip(lacking)
    with huge_page_pool(8) if snippet.needs == "huge pages" else contextlib.nullcontext():
        RUN[snippet.language](snippet, tmp_path)


RUN = {"python": run_python, "console": run_console, "cmake": run_cmake, "c": run_c}

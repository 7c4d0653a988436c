"""The behaviour that all commands share."""

import os
import pty
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import TIMEOUT, environment

import rdmafork
from rdmafork.cli import COMMANDS, main

RDMAFORK = [sys.executable, "-m", "rdmafork"]


def command(*arguments, **options):
    return subprocess.run(
        [*RDMAFORK, *arguments], env=environment({"COLUMNS": "80"}), capture_output=True,
        text=True, check=False, timeout=TIMEOUT, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_teaches_in_eighty_columns(name):
    done = command(*filter(None, [name]), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    if name:
        assert "Exit status" in done.stdout and done.stdout.startswith(f"usage: rdmafork {name}")
    else:
        assert all(f"    {other} " in done.stdout for other in COMMANDS)


def test_the_version_and_wrong_usage():
    assert command("--version").stdout == f"rdmafork {rdmafork.__version__}\n"
    assert command().returncode == 2
    for arguments in (("nonsense",), ("devices", "--nonsense"), ("doctor", "--pid", "x")):
        done = command(*arguments)
        assert done.returncode == 2 and done.stderr and not done.stdout, arguments


@pytest.mark.parametrize(
    ("arguments", "status", "usage", "message"),
    [
        ("docter", 2, "rdmafork COMMAND", "rdmafork: there is no command docter. "
         "Did you mean doctor?"),
        ("xyzzy", 2, "rdmafork COMMAND", "rdmafork: there is no command xyzzy. "
         f"The commands are {', '.join(COMMANDS)}."),
        ("help docter", 2, "rdmafork COMMAND", "rdmafork: there is no command docter. "
         "Did you mean doctor?"),
        ("--versoin", 2, "rdmafork COMMAND", "rdmafork: there is no option --versoin. "
         "Did you mean --version?"),
        ("--vers", 2, "rdmafork COMMAND", "rdmafork: there is no option --vers. "
         "Did you mean --version?"),
        ("doctor --strikt", 2, "rdmafork doctor ", "rdmafork doctor: there is no option --strikt. "
         "Did you mean --strict?"),
        ("doctor --stric", 2, "rdmafork doctor ", "rdmafork doctor: there is no option --stric. "
         "Did you mean --strict?"),
        ("doctor --xyzzy", 2, "rdmafork doctor ", "rdmafork doctor: there is no option --xyzzy."),
        ("devices mlx5_0", 2, "rdmafork devices ", "rdmafork devices: unexpected argument: mlx5_0"),
        ("exec --repot=r -- ls", 125, "rdmafork exec ", "rdmafork exec: there is no option "
         "--repot. Did you mean --report?"),
    ],
)  # fmt: skip
def test_a_wrong_word_gets_its_command_s_usage_and_a_suggestion(arguments, status, usage, message):
    done = command(*arguments.split())
    first, *_, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, last) == (status, "", message)
    assert first.startswith(f"usage: {usage}")


def test_help_is_a_command_too():
    assert command("help").stdout == command("--help").stdout
    assert command("help", "exec").stdout == command("exec", "--help").stdout
    assert command("help", "help").stdout == command("--help").stdout


@pytest.mark.parametrize("arguments", [("--help",), ("doctor",), ("devices", "--help")])
def test_a_reader_that_stops_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    env = environment({"PYTHONUNBUFFERED": None})  # else argparse meets it first, and is silent
    with subprocess.Popen(
        [*RDMAFORK, *arguments], stdout=writing, stderr=subprocess.PIPE, env=env
    ) as process:
        os.close(writing)
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("arguments", [("config",), ("doctor",), ("devices", "--json")])
@pytest.mark.parametrize("unbuffered", [None, "1"])
def test_a_full_disk_is_told(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RDMAFORK, *arguments], stdout=full, stderr=subprocess.PIPE, text=True,
            env=environment({"PYTHONUNBUFFERED": unbuffered}), timeout=TIMEOUT,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1:] == [
        "rdmafork: the output cannot be written: No space left on device"
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    # Process 1 may be looked at or not.
    [("--version", 0), ("config", 0), ("doctor --pid 1", None), ("report /dev/null", 2), ("no", 2)],
)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(arguments, status, closed):
    line = f"{shlex.join(RDMAFORK)} {arguments}"
    plain = subprocess.run(line, shell=True, capture_output=True, env=environment({}))
    done = subprocess.run(f"{line} {closed}", shell=True, capture_output=True, env=environment({}))
    assert done.returncode == plain.returncode
    assert status in (None, done.returncode)
    assert done.stdout == (b"" if ">&-" in closed.split() else plain.stdout)
    assert done.stderr == (b"" if "2>&-" in closed else plain.stderr)


def test_a_report_from_a_closed_stdin_is_none():
    line = f"{shlex.join(RDMAFORK)} report - <&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment({}))
    assert done.returncode == 2 and "no reports: exec(), _exit() or a signal" in done.stderr


def test_descriptors_closed_before_exec_are_closed_in_the_program():
    code = "import os; print([fd for fd in range(3) if not os.path.exists(f'/proc/self/fd/{fd}')])"
    line = f"{shlex.join([*RDMAFORK, 'exec', '--', sys.executable, '-c', code])} <&- 2>&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment({}))
    assert (done.returncode, done.stdout) == (0, "[0, 2]\n")


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    from rdmafork.cli import devices

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "run", interrupted)
    assert main(["devices"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "\n")


def on_a_terminal(*arguments, **env):
    control, screen = pty.openpty()
    with subprocess.Popen(
        [*RDMAFORK, *arguments], stdout=screen, stderr=screen,
        env=environment({"TERM": "xterm", "NO_COLOR": None} | env),
    ) as process:  # fmt: skip
        os.close(screen)
        output = b""
        try:
            while got := os.read(control, 65536):
                output += got
        except OSError:
            pass  # EIO: the program has ended
        os.close(control)
    assert process.returncode in (0, 1)
    return output.decode()


def test_colours_only_where_they_are_wanted():
    assert "\033[32mOK" in on_a_terminal("doctor")
    assert "\033" not in on_a_terminal("doctor", NO_COLOR="1")
    assert "\033" not in on_a_terminal("doctor", TERM="dumb")
    assert "\033" not in command("doctor").stdout


def test_colours_can_be_asked_for():
    assert "\033[32mOK" in command("doctor", "--color=always").stdout
    assert "\033" not in on_a_terminal("doctor", "--color", "never")
    assert "\033[32mOK" in on_a_terminal("doctor", "--color=always", NO_COLOR="1")

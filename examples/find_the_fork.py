"""Who forks? A program that calls nothing of the name, and forks three times.

    python examples/find_the_fork.py
    rdmafork exec --trace-forks --report - -- python examples/find_the_fork.py

Under `rdmafork exec --trace-forks` each place in it that forks is told once, with its stack; the
report at its end has the C functions that called fork(), which is how it is found in a program that
is not Python's.
"""

import multiprocessing
import os
import subprocess
import sys


def start_a_worker() -> None:
    worker = multiprocessing.get_context("fork").Process(target=print, args=("a worker",))
    worker.start()
    worker.join()


def run_with_lower_priority() -> None:
    # preexec_fn makes subprocess fork(), where it would vfork(): safe, and free, without it.
    subprocess.run([sys.executable, "-c", "print('a program')"], preexec_fn=lambda: os.nice(1))


def open_a_terminal() -> None:
    pid, terminal = os.forkpty()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(terminal)
    print("a terminal")


if __name__ == "__main__":
    for step in (start_a_worker, run_with_lower_priority, open_a_terminal):
        step()
        sys.stdout.flush()

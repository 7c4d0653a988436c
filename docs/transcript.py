"""A terminal's text: each command after "$ ", its output, its exit status if not 0.

    python docs/transcript.py 'rdmafork devices' 'rdmafork doctor' > docs/transcripts/doctor.txt

Run it where there is an RDMA device; exec.txt is of examples/pyverbs_pool.py. The commands of this
installation come first in PATH.
"""

import os
import subprocess
import sys
from pathlib import Path


def shown(command: str) -> str:
    # As in a terminal that was just opened.
    foreign = ("RDMAV_", "IBV_", "RDMAFORK_", "LD_PRELOAD", "PYTHON")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", command],
        env=environ | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    status = f"[exit status {done.returncode}]\n" if done.returncode else ""
    return f"$ {command}\n{done.stdout}{status}"


if __name__ == "__main__":
    print("\n".join(shown(command) for command in sys.argv[1:]), end="")

"""Large registered buffers, in base pages and in huge ones: what they cost to make and to fork.

    python examples/large_buffers.py [MiB]

A Buffer is registered for life and shares no page with anything. From 2 MiB on it is advised to
become transparent huge pages; page_size= asks for pages of the kernel's pool instead, which has to
have them: as root, echo 512 > /proc/sys/vm/nr_hugepages.
"""

import os
import sys
import time

import rdmafork

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 256
KINDS = {"base pages": 4096, "transparent huge pages": None, "2 MiB huge pages": 2 << 20}


def fork_ms() -> float:
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    took = time.perf_counter() - start
    os.waitpid(pid, 0)
    return took * 1000


def main() -> None:
    rdmafork.fork_init()
    print(f"{MIB} MiB of            made and touched   fork()")
    for name, page_size in KINDS.items():
        start = time.perf_counter()
        try:
            buffer = rdmafork.Buffer(MIB << 20, page_size=page_size)
        except OSError as error:  # how many huge pages it takes, how many are free, what to write
            print(f"{name:23} {error.strerror}")
            continue
        with buffer:
            with memoryview(buffer) as view:  # or numpy.frombuffer(buffer), torch.frombuffer
                view[::4096] = bytes(len(view[::4096]))
            made = time.perf_counter() - start
            print(f"{name:23} {made * 1000:13.0f} ms {fork_ms():8.2f} ms")


if __name__ == "__main__":
    main()

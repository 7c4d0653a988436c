"""A child and its parent's connection manager, /dev/infiniband/rdma_cm, under exec."""

import errno
import os
import random
import signal
import subprocess
import sys

import pytest
from conftest import SLOWNESS, TIMEOUT, environment

import rdmafork

# ..., PORT: listens there. The numbers it prints are errno.
LISTENS = """
import ctypes, os, signal, socket, struct, sys
cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
pointer = ctypes.c_void_p
cm.rdma_create_event_channel.restype = pointer
cm.rdma_create_id.argtypes = [pointer, pointer, pointer, ctypes.c_int]
cm.rdma_bind_addr.argtypes = [pointer, ctypes.c_char_p]
cm.rdma_listen.argtypes = [pointer, ctypes.c_int]
cm.rdma_destroy_id.argtypes = [pointer]

def told(result):
    return ctypes.get_errno() if result else 0

RDMA_PS_TCP = 0x0106
identifier = pointer()
channel = cm.rdma_create_event_channel()
assert not cm.rdma_create_id(channel, ctypes.byref(identifier), None, RDMA_PS_TCP)
anywhere = struct.pack("=H", socket.AF_INET) + struct.pack("!H", int(sys.argv[1])) + bytes(12)
print(told(cm.rdma_bind_addr(identifier, anywhere) or cm.rdma_listen(identifier, 1)), flush=True)
"""
DIES = """
pid = os.fork()
if not pid:
    signal.alarm(int(sys.argv[2]))  # if it waits for an answer
    print(told(cm.rdma_destroy_id(identifier)), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
if not os.fork():
    print("lives", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(source, port, keep=False):
    env = {"RDMAFORK_EXEC": "1", "LD_PRELOAD": rdmafork.get_library()}
    env["RDMAFORK_KEEP_DEVICES"] = "1" if keep else None
    return subprocess.Popen(
        [sys.executable, "-c", source, str(port), str(int(5 * SLOWNESS))], env=environment(env),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("keep", [False, True])
def test_a_child_ends_nothing_and_a_dead_parent_s_port_is_free(device, keep):
    if not os.path.exists("/dev/infiniband/rdma_cm"):
        pytest.skip("no connection manager: modprobe rdma_ucm")
    port = random.randrange(20000, 30000)
    server = start(LISTENS + DIES, port, keep)
    try:
        assert server.stdout.readline() == "0\n"
        # The kernel refuses who did not open it; here nobody is asked.
        assert int(server.stdout.readline()) == (errno.EACCES if keep else errno.EBADF)
        assert server.stdout.readline() == "lives\n"
        assert server.wait(timeout=TIMEOUT) == -signal.SIGKILL
        again = start(LISTENS, port).communicate(timeout=TIMEOUT)[0]
        assert int(again) == (errno.EADDRNOTAVAIL if keep else 0)
    finally:
        server.kill()
        server.communicate()

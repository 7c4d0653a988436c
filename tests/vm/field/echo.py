"""A server that forks for each connection, and its client: for tests/vm/test_field.py.

    echo.py server PORT
    echo.py client PORT

librdmacm's preload library turns their sockets into rsockets. With RDMAV_FORK_SAFE=1 it does so at
the first read or write, thus in the child that serves a connection. It leaves accept4() and sockets
with SOCK_CLOEXEC alone, and Python's own use both: so libc is called here.
"""

import ctypes
import os
import socket
import struct
import sys

ADDRESS, CONNECTIONS, NBYTES, PIECE = "10.77.0.1", 2, 1 << 20, 1 << 16
libc = ctypes.CDLL(None, use_errno=True)


def told(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def new():
    return told(libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0))


def address(port):
    there = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(ADDRESS)
    return there + bytes(8), 16


def send(sock, data):
    while data:
        data = data[told(libc.send(sock, data, len(data), 0)) :]


def receive(sock, nbytes):
    """That many bytes, or fewer at the end."""
    data, buffer = b"", ctypes.create_string_buffer(PIECE)
    while len(data) < nbytes:
        got = told(libc.recv(sock, buffer, min(PIECE, nbytes - len(data)), 0))
        if not got:
            break
        data += buffer.raw[:got]
    return data


def devices():
    """The RDMA devices that are open here."""
    names = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sorted({name for name in names if name.startswith("/dev/infiniband/")})


def serve(sock):
    while piece := receive(sock, PIECE):
        send(sock, piece)
    libc.close(sock)


def server(port):
    listening = new()
    reuse = ctypes.byref(ctypes.c_int(1))
    told(libc.setsockopt(listening, socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse, 4))
    told(libc.bind(listening, *address(port)))
    told(libc.listen(listening, 5))
    for _ in range(CONNECTIONS):
        connection = told(libc.accept(listening, None, None))
        pid = os.fork()
        if not pid:
            serve(connection)
            sys.exit(0)
        libc.close(connection)
        assert os.waitpid(pid, 0)[1] == 0


def client(port):
    for _ in range(CONNECTIONS):
        sock = new()
        told(libc.connect(sock, *address(port)))
        for _ in range(NBYTES // PIECE):
            piece = os.urandom(PIECE)
            send(sock, piece)
            assert receive(sock, PIECE) == piece
        print("echoed over", *devices(), flush=True)
        libc.close(sock)


if __name__ == "__main__":
    {"server": server, "client": client}[sys.argv[1]](int(sys.argv[2]))

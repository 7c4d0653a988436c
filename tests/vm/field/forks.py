"""Memory that a library of the field registers, forks, and the device: for tests/vm/test_field.py.

    forks.py LIBRARY DEVICE

Prints one JSON object. It knows nothing of rdmafork: only the environment says under what it runs.
"""

import atexit
import ctypes
import json
import mmap
import os
import signal
import sys
import time

NBYTES = 64 << 20
PORT, GID_INDEX = 1, 1  # RoCE v2 of soft-RoCE


def memory(nbytes):
    """Private, and there: shared memory would cost a fork nothing."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped[:: mmap.PAGESIZE] = b"x" * (nbytes // mmap.PAGESIZE)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


# ---- each library: it writes `length` bytes from source to target with the device ----------------


def ibverbs(device, source, target):
    import ibverbs as ib

    (found,) = [one for one in ib.get_device_list() if one.name in (device, device.encode())]
    context = found.open()
    domain, queue = context.alloc_pd(), context.create_cq(16)
    access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
    near, far = (domain.reg_mr(address, nbytes, access) for address, nbytes in (source, target))
    pair = domain.create_qp(ib.QPInitAttr(send_cq=queue, recv_cq=queue, qp_type=ib.QPType.RC))
    itself = ib.local_qp_info(
        pair, context.query_port(PORT), context.query_gid(PORT, GID_INDEX), port=PORT
    )
    ib.connect_rc(pair, itself, port=PORT, sgid_index=GID_INDEX, access=access)

    def write(length):
        entry = ib.SGE(near, length)
        pair.post_send(
            ib.SendWR(
                sg_list=[entry], opcode=ib.WROpcode.RDMA_WRITE, remote_addr=target[0],
                rkey=far.rkey, send_flags=ib.SendFlags.SIGNALED,
            )
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not (done := queue.poll(1)):
            assert time.monotonic() < deadline, "no completion"
            time.sleep(0.001)
        done[0].raise_for_status()

    return write


def dlslime(device, source, target):
    from dlslime import RDMAEndpoint

    near, far = (RDMAEndpoint(device, PORT, "RoCE", 1) for _ in range(2))
    mine = near.register_memory_region("source", source[0], 0, source[1])
    far.register_memory_region("target", target[0], 0, target[1])
    near.connect(far.endpoint_info())
    far.connect(near.endpoint_info())
    theirs = near.register_remote_memory_region("target", far.mr_info()["target"])

    def write(length):
        near.write([(mine, theirs, 0, 0, length)]).wait()

    write.alive = far
    return write


def mooncake(device, source, target):
    from mooncake.engine import TransferEngine

    engines = [TransferEngine() for _ in range(2)]
    address = "10.77.0.1"
    for engine in engines:
        assert not engine.initialize(address, "P2PHANDSHAKE", "rdma", device), "no engine"
    near, far = engines
    assert not near.register_memory(*source) and not far.register_memory(*target), "no region"
    there = f"{address}:{far.get_rpc_port()}"

    def write(length):
        status = near.transfer_sync_write(there, source[0], target[0], length)
        assert not status, f"status {status}"

    write.alive = far

    return write


def open_mpi(device, source, target):
    """Both ranks run this script in step, and each puts into the other's window."""
    import mpi4py

    mpi4py.rc.finalize = False  # not a child's to do, which would wait there for the other rank
    from mpi4py import MPI

    parent = os.getpid()
    atexit.register(lambda: os.getpid() == parent and MPI.Finalize())
    world = MPI.COMM_WORLD
    near, far = (
        MPI.memory.fromaddress(address, nbytes, readonly=False)
        for address, nbytes in (source, target)
    )
    window = MPI.Win.Create(far, comm=world)

    def write(length):
        window.Fence()
        window.Put([near, length, MPI.BYTE], (world.rank + 1) % world.size)
        window.Fence()

    return write


def nixl(device, source, target):
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    near, far = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("near", "far"))
    mine, theirs = (
        agent.register_memory([(*where, 0, "")], "DRAM")
        for agent, where in ((near, source), (far, target))
    )
    there = near.add_remote_agent(far.get_agent_metadata())

    def write(length):
        lists = [
            near.get_xfer_descs([(address, length, 0)], "DRAM") for address, _ in (source, target)
        ]
        transfer = near.initialize_xfer("WRITE", *lists, there)
        state, deadline = near.transfer(transfer), time.monotonic() + 60
        while state == "PROC":
            assert time.monotonic() < deadline, "no completion"
            time.sleep(0.001)
            state = near.check_xfer_state(transfer)
        assert state == "DONE", state
        near.release_xfer_handle(transfer)

    write.alive = far, mine, theirs
    return write


def gloo(device, source, target):
    shim = ctypes.CDLL(os.environ["GLOO"])
    where = [
        argument
        for address, nbytes in (source, target)
        for argument in (ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    ]
    assert not shim.field_connect(device.encode(), PORT, GID_INDEX, *where), "no pairs"

    def write(length):
        assert not shim.field_write(ctypes.c_size_t(length)), "no write"

    return write


# ---- forks ---------------------------------------------------------------------------------------


def written(write, source, target, word):
    """Does the parent find in target what the device wrote there?"""
    source[: len(word)] = word
    target[: len(word)] = b"?" * len(word)  # where a page was moved at a fork, the parent's new one
    try:
        write(len(word))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    return "arrived" if target[: len(word)] == word else "lost"


def fork(ends):
    """(how long the fork took, a function that lets the child end and gives how it did)."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    took = time.perf_counter() - began
    if not pid:
        signal.alarm(30)  # long enough for any destructor
        os.close(writing)
        os.read(reading, 1)
        ends(0)
    os.close(reading)

    def end():
        os.close(writing)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return took * 1e3, end


def kilobytes(name, path="/proc/self/status"):
    with open(path) as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


def not_copied(address):
    """How many KiB of the memory from there on are kept from children, by VmFlags."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(number, 16) for number in first.split("-"))
                inside = start < address + NBYTES and end > address
                size = (min(end, address + NBYTES) - max(start, address)) >> 10
            elif inside and first == "VmFlags:" and {"dc", "wf"} & set(line.split()):
                total += size
    return total


def main(library, device):
    (near, start), (far, there) = memory(mmap.PAGESIZE), memory(NBYTES)
    write = globals()[library.lower().replace(" ", "_")](
        device, (start, mmap.PAGESIZE), (there, NBYTES)
    )
    found = {"pid": os.getpid(), "before": written(write, near, far, b"before")}
    found["pinned"] = kilobytes("VmPin:")
    took, end = fork(os._exit)
    found["during"] = written(write, near, far, b"during")
    found["ended"] = end()
    times = [took]
    for _ in range(2):
        took, end = fork(os._exit)
        end()
        times.append(took)
    found["fork_ms"] = sorted(times)[1]
    found["kept"] = not_copied(there)
    found["after"] = written(write, near, far, b"after")
    _, end = fork(sys.exit)  # with the library's destructors
    found["destructors"] = end()
    found["after_destructors"] = written(write, near, far, b"later")
    print(json.dumps(found), flush=True)
    del write  # and its objects of the library, before the memory goes


if __name__ == "__main__":
    main(*sys.argv[1:])

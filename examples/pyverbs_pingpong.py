"""Two processes send a buffer back and forth through pyverbs, and both fork all the while.

    python examples/pyverbs_pingpong.py DEVICE [ROUNDS] [MiB]

Every byte is compared at every arrival. Without rdmafork the same program can lose data before
Linux 5.12, whose fork() does not copy pinned pages; later kernels copy the whole buffer at each
fork. The buffer is registered twice: with rdmafork, for fork(), and with pyverbs, for the device.
With fork_init(intercept=True), or under `rdmafork exec`, the second is enough.

Needs pyverbs (Debian: python3-pyverbs, with Debian's own python3), and a port that is up.
"""

import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection

try:
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context
    from pyverbs.enums import (
        IBV_ACCESS_LOCAL_WRITE,
        IBV_LINK_LAYER_ETHERNET,
        IBV_QPT_RC,
        IBV_WC_SUCCESS,
        IBV_WR_SEND,
    )
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR
except ImportError as error:
    sys.exit(f"pyverbs_pingpong.py needs pyverbs (Debian: python3-pyverbs): {error}")

import rdmafork

PORT = 1


class End:
    """One end: a registered buffer, a queue pair, and a thread that forks."""

    def __init__(self, device: str, nbytes: int) -> None:
        rdmafork.fork_init()
        self.memory = bytearray(nbytes)
        self.held = rdmafork.register(self.memory)
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.mr = MR(self.pd, nbytes, IBV_ACCESS_LOCAL_WRITE, address=self.held.address)
        self.channel = CompChannel(self.context)
        self.cq = CQ(self.context, 4, None, self.channel, 0)
        self.cq.req_notify()
        ethernet = self.context.query_port(PORT).link_layer == IBV_LINK_LAYER_ETHERNET
        self.gid_index = 1 if ethernet else 0  # on Ethernet, that of RoCE v2
        first = QPInitAttr(qp_type=IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(2, 2, 1, 1))
        self.qp = QP(self.pd, first, QPAttr(port_num=PORT))
        self.forks, self.ending = 0, threading.Event()
        self.forker = threading.Thread(target=self.fork_all_the_while)

    def connect(self, peer: Connection) -> None:
        gid = self.context.query_gid(PORT, self.gid_index).gid
        peer.send((self.qp.qp_num, gid, self.context.query_port(PORT).lid))
        number, gid, lid = peer.recv()
        attributes = QPAttr(port_num=PORT)
        attributes.dest_qp_num = number
        attributes.path_mtu = self.context.query_port(PORT).active_mtu
        attributes.min_rnr_timer, attributes.timeout = 12, 18
        attributes.retry_cnt = attributes.rnr_retry = 7
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT, dlid=lid)
        self.qp.to_rts(attributes)

    def fork_all_the_while(self) -> None:
        while not self.ending.is_set():
            pid = os.fork()
            if pid == 0:
                # Not exit(): collected here, pyverbs' objects would destroy the parent's.
                os._exit(0)
            os.waitpid(pid, 0)
            self.forks += 1

    def expect(self) -> None:
        """A place for the next message; the other end is told when it is there."""
        self.qp.post_recv(RecvWR(num_sge=1, sg=[self.piece()]))

    def send(self) -> None:
        self.qp.post_send(SendWR(opcode=IBV_WR_SEND, num_sge=1, sg=[self.piece()]))

    def piece(self) -> SGE:
        return SGE(self.held.address, self.held.nbytes, self.mr.lkey)

    def wait(self) -> None:
        while True:
            count, completions = self.cq.poll(1)
            if count:
                break
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
            self.cq.req_notify()
        if completions[0].status != IBV_WC_SUCCESS:
            raise SystemExit(f"a completion with status {completions[0].status}")

    def close(self) -> None:
        self.ending.set()
        self.forker.join()
        for each in (self.qp, self.cq, self.channel, self.mr, self.pd, self.context, self.held):
            each.close()


def pattern(number: int, nbytes: int) -> bytes:
    return bytes((number + i) % 256 for i in range(256)) * (nbytes // 256)


def run(device: str, rounds: int, nbytes: int, peer: Connection, begins: bool) -> None:
    end = End(device, nbytes)
    end.connect(peer)
    end.forker.start()
    try:
        for number in range(rounds):
            if begins == (number % 2 == 0):
                end.memory[:] = pattern(number, nbytes)
                assert peer.recv() == "ready"
                end.send()
                end.wait()
            else:
                end.memory[:] = bytes(nbytes)
                end.expect()
                peer.send("ready")
                end.wait()
                assert end.memory == pattern(number, nbytes), f"round {number} has lost data"
    finally:
        end.close()
    name = "ping" if begins else "pong"
    print(f"{name}: {rounds} rounds of {nbytes >> 10} KiB, {end.forks} forks, every byte right")


def main() -> None:
    device = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    nbytes = int(float(sys.argv[3]) * (1 << 20)) if len(sys.argv) > 3 else 4 << 20
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    pong = spawn.Process(target=run, args=(device, rounds, nbytes, there, False))
    pong.start()
    try:
        run(device, rounds, nbytes, here, True)
    finally:
        pong.join()
    sys.exit(pong.exitcode)


if __name__ == "__main__":
    main()

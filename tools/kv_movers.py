"""Speed of each mover of KV blocks beside its plain limit, in one run: two processes of this machine.

    python -m tools.kv_movers                       # shm and tcp; blocks of the default model
    python -m tools.kv_movers --movers nixl --piece 32768
    python -m tools.kv_movers --movers cuda --parts 64 --piece 131072   # on a GPU; blocks of an 8B

The limit of shared memory is a plain numpy copy of as many bytes, that of CUDA IPC a copy within the GPU's memory, the
limit of TCP and NIXL is a socket between two processes that sends and receives as many bytes, in parts of as many as a
message has. Rounds of all take turns, so that
what else the machine does meets all of them. Ratios are of CPU seconds of both processes together (which a busy machine
does not change much) and of the medians of wall-clock time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from penstock.runner.kv_memory import byte_tools
from penstock.transfer.host_memory import HostMemory, Parts
from penstock.transfer.messages import Ask, Ended, Layout
from penstock.transfer.nixl import NixlMover
from penstock.transfer.ports import BlockMemory, Credited, Mover, Told
from penstock.transfer.shared_memory import MemoryFile, SharedMemoryMover
from penstock.transfer.tcp import TcpNetwork

_SECRET = "measured"
_PART_BYTES = 8 << 20
_LIMITS = {"shm": "numpy copy", "tcp": "sockets", "nixl": "sockets", "cuda": "device copy"}


_LAYOUT = Layout("measured", "none", "bytes", "none", "bytes", 16, "TP1")


def _on_gpu(arguments: argparse.Namespace) -> tuple[BlockMemory, list[Mover]]:
    import torch

    from penstock.runner.cuda_driver import CudaDriver
    from penstock.runner.cuda_kv_memory import CudaMover, DeviceMemory
    from penstock.runner.virtual_memory import VirtualMemory

    driver = CudaDriver(torch.device("cuda", 0))
    virtual = VirtualMemory(driver, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    shape = (arguments.parts // 2, 2, arguments.blocks, arguments.piece)
    memory = DeviceMemory(virtual.zeros(shape, dtype=torch.uint8, device=torch.device("cuda", 0)), _LAYOUT)
    return memory, [CudaMover(memory, virtual, driver, _SECRET)]


class Side:
    """A cache without a model, and its end of the network."""

    def __init__(self, arguments: argparse.Namespace, mover: str) -> None:
        if mover == "cuda":
            memory, movers = _on_gpu(arguments)
            self.network = TcpNetwork(memory, mover, _SECRET, timeout_s=60.0, movers=movers, sends_bytes=False)
            return
        file, sizes = MemoryFile(), [arguments.piece] * arguments.parts
        self.wholes = [file.allocate(arguments.blocks * size) for size in sizes]
        for whole in self.wholes:
            np.frombuffer(whole, np.uint8)[:] = 7  # its pages are there
        memory = HostMemory(Parts(self.wholes, sizes), _LAYOUT, byte_tools())
        movers: list[Mover] = []
        if mover == "shm":
            movers = [SharedMemoryMover(memory, [file.lend(memory.parts)], _SECRET)]
        elif mover == "nixl":
            movers = [NixlMover(memory, timeout_s=60.0)]
        self.network = TcpNetwork(memory, mover, _SECRET, timeout_s=60.0, movers=movers, sends_bytes=mover == "tcp")


def lend(arguments: argparse.Namespace, mover: str, pipe: Connection) -> None:
    """The other process: all blocks, to whoever asks, in the order that the pipe says."""
    network = Side(arguments, mover).network
    pipe.send(network.listen("127.0.0.1", 0))
    while True:
        network.wait(60.0)
        for event in network.take():
            if isinstance(event, Credited):
                network.send(event.peer, event.ticket, 0, pipe.recv())
                network.end(event.peer, Ended(event.ticket))


def send_plainly(num_bytes: int, pipe: Connection) -> None:
    """The other process of plain sockets."""
    data = memoryview(bytearray(b"x" * num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        sock, _ = listening.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PART_BYTES)
        while sock.recv(1):
            for start in range(0, num_bytes, _PART_BYTES):
                sock.sendall(data[start : start + _PART_BYTES])


class Work(Protocol):
    pids: Sequence[int]  # whose CPU time counts

    def __call__(self) -> None:
        """One round."""


class Pull:
    """All blocks, from one process to the other."""

    def __init__(self, arguments: argparse.Namespace, mover: str, *, scatters: bool) -> None:
        self._side = Side(arguments, mover)
        ours, theirs = multiprocessing.Pipe()
        self.pids = [os.getpid(), _started(lend, arguments, mover, theirs)]
        self._pipe, self._address = ours, f"127.0.0.1:{ours.recv()}"
        self._ticket = 0
        dice = random.Random(1)
        ids = list(range(arguments.blocks))
        self._orders = [dice.sample(ids, len(ids)) if scatters else ids for _ in range(2)]

    def __call__(self) -> None:
        self._ticket += 1
        network = self._side.network
        here, there = self._orders
        self._pipe.send(there)
        network.ask(self._address, Ask(self._ticket, [bytes(16)] * len(here)))
        network.land(self._ticket, here)
        while True:
            network.wait(60.0)
            for event in network.take():
                if isinstance(event, Told):
                    assert not event.ended.reason, event.ended.reason
                    return


class PlainSockets:
    def __init__(self, num_bytes: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.pids = [os.getpid(), _started(send_plainly, num_bytes, theirs)]
        self._socket = socket.create_connection(("127.0.0.1", ours.recv()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PART_BYTES)
        self._into = memoryview(bytearray(b"x" * num_bytes))

    def __call__(self) -> None:
        self._socket.sendall(b"x")
        left = self._into
        while left:
            left = left[self._socket.recv_into(left[:_PART_BYTES]) :]


class PlainCopy:
    def __init__(self, num_bytes: int) -> None:
        self.pids = [os.getpid()]
        file = MemoryFile()
        self._source, self._target = (np.frombuffer(file.allocate(num_bytes), np.uint8) for _ in range(2))
        self._source[:] = self._target[:] = 7

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


class DeviceCopy:
    """A copy within the memory of a GPU."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.pids = [os.getpid()]
        self._source, self._target = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def __call__(self) -> None:
        import torch

        self._target.copy_(self._source)
        torch.cuda.synchronize()


def _started(target: Callable[..., None], *arguments: object) -> int:
    process = multiprocessing.Process(target=target, args=arguments, daemon=True)
    process.start()
    assert process.pid is not None
    return process.pid


def _cpu_s(pids: Sequence[int]) -> float:
    """Returns what all threads of these processes used so far, in the kernel and outside."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--movers", default="shm,tcp", help="of shm, tcp, nixl, cuda")
    parser.add_argument("--parts", type=int, default=60, help="pieces that a block is made of: two for each layer")
    parser.add_argument("--piece", type=int, default=6144, help="bytes of a piece")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    num_bytes = arguments.parts * arguments.piece * arguments.blocks
    makers = {"numpy copy": PlainCopy, "sockets": PlainSockets, "device copy": DeviceCopy}
    needed = {_LIMITS[mover] for mover in arguments.movers.split(",")}
    limits: dict[str, Work] = {name: make(num_bytes) for name, make in makers.items() if name in needed}
    pulls: dict[tuple[str, bool], Work] = {
        (mover, scatters): Pull(arguments, mover, scatters=scatters)
        for mover in arguments.movers.split(",")
        for scatters in (False, True)
    }
    rounds: dict[object, Work] = {**limits, **pulls}
    seconds: dict[object, list[float]] = {key: [] for key in rounds}
    cpu_s: dict[object, float] = dict.fromkeys(rounds, 0.0)
    for number in range(arguments.rounds + 1):
        for key, work in rounds.items():
            began_s, began_cpu_s = perf_counter(), _cpu_s(work.pids)
            work()
            if number:  # the first one makes connections
                seconds[key].append(perf_counter() - began_s)
                cpu_s[key] += _cpu_s(work.pids) - began_cpu_s
    print(f"{num_bytes / 1e6:,.0f} MB: {arguments.blocks} blocks of {arguments.parts} x {arguments.piece} bytes")
    print(
        "| mover | blocks | GB per CPU second | of the limit | GB/s, median | of the limit |\n|---|---|---|---|---|---|"
    )
    wall_s = {key: statistics.median(each) for key, each in seconds.items()}
    cpu_s = {key: max(each, 1 / os.sysconf("SC_CLK_TCK")) for key, each in cpu_s.items()}
    for name in limits:
        print(_row(name, "", num_bytes * arguments.rounds / cpu_s[name], None, num_bytes / wall_s[name], None))
    for mover, scatters in pulls:
        key, limit = (mover, scatters), _LIMITS[mover]
        order, ratios = (
            "scattered" if scatters else "in a row",
            (cpu_s[limit] / cpu_s[key], wall_s[limit] / wall_s[key]),
        )
        print(
            _row(mover, order, num_bytes * arguments.rounds / cpu_s[key], ratios[0], num_bytes / wall_s[key], ratios[1])
        )


def _row(name: str, order: str, cpu_speed: float, cpu_ratio: float | None, speed: float, ratio: float | None) -> str:
    ratios = ["" if each is None else f"{each:.2f}" for each in (cpu_ratio, ratio)]
    return f"| {name} | {order} | {cpu_speed / 1e9:.2f} | {ratios[0]} | {speed / 1e9:.2f} | {ratios[1]} |"


if __name__ == "__main__":
    main()

"""Movers of KV blocks under test: pairs of networks of which the first pulls from the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

import pytest
from msgspec.structs import replace

from penstock.transfer.messages import Ask, Layout
from penstock.transfer.ports import Event, Landed, Sent, Told
from penstock.transfer.shared_memory import MemoryFile, SharedMemoryMover
from penstock.transfer.tcp import TcpNetwork
from tests.gpu import NEEDS_GPU
from tests.transfer.fakes import FakeMemory
from tests.waiting import eventually

NUM_BLOCKS, BLOCK = 16, 4


class Filled(Protocol):
    """`BlockMemory` whose content a test knows."""

    def fill(self, plus: int = 0) -> None:
        """Each block with something of its own."""

    def content(self, block_id: int) -> list[int]: ...


class Memory(FakeMemory):
    def __init__(self, layout: Layout | None = None, file: MemoryFile | None = None) -> None:
        super().__init__(NUM_BLOCKS, BLOCK, file)
        self.layout = layout or self.layout

    def fill(self, plus: int = 0) -> None:
        for block_id in range(NUM_BLOCKS):
            self[block_id] = [1000 * (block_id + 1) + i + plus for i in range(BLOCK)]

    def content(self, block_id: int) -> list[int]:
        return list(self[block_id])


@dataclass
class Side:
    network: TcpNetwork
    memory: Filled
    seen: list[Event] = field(default_factory=list)

    def events(self, kind: type) -> list[Event]:
        self.seen += self.network.take()
        return [event for event in self.seen if isinstance(event, kind)]

    def told(self, ticket: int) -> Told | None:
        return next((e for e in self.events(Told) if isinstance(e, Told) and e.ended.ticket == ticket), None)

    def landed(self, ticket: int) -> list[int]:
        """Places in the chain, in the order in which they came."""
        return [
            place
            for event in self.events(Landed)
            if isinstance(event, Landed) and event.ticket == ticket
            for place in range(event.first, event.first + event.count)
        ]

    def num_sent(self, ticket: int) -> int:
        return sum(event.count for event in self.events(Sent) if isinstance(event, Sent) and event.ticket == ticket)


@dataclass
class Pair:
    puller: Side
    lender: Side
    address: str

    def ask(self, ticket: int, hashes: Sequence[bytes]) -> None:
        self.puller.network.ask(self.address, Ask(ticket, list(hashes)))


def tcp_side(secret: str = "s", *, layout: Layout | None = None, epoch: str = "e", retry_s: float = 0.0) -> Side:
    memory = Memory(layout)
    return Side(TcpNetwork(memory, epoch, secret, timeout_s=5.0, retry_s=retry_s), memory)


def shm_side(secret: str = "s", *, epoch: str = "e", sends_bytes: bool = False) -> Side:
    file = MemoryFile()
    memory = Memory(file=file)
    mover = SharedMemoryMover(memory, [file.lend(memory.parts)], secret)
    network = TcpNetwork(memory, epoch, secret, timeout_s=5.0, retry_s=0.0, movers=[mover], sends_bytes=sends_bytes)
    return Side(network, memory)


def nixl_side(secret: str = "s", *, epoch: str = "e") -> Side:
    from penstock.transfer.nixl import NixlMover

    memory = Memory()
    mover = NixlMover(memory, timeout_s=30.0)
    network = TcpNetwork(memory, epoch, secret, timeout_s=5.0, retry_s=0.0, movers=[mover], sends_bytes=False)
    return Side(network, memory)


def cuda_side(secret: str = "s", *, epoch: str = "e") -> Side:
    from penstock.runner.cuda_driver import CudaDriver
    from penstock.runner.cuda_kv_memory import CudaMover
    from tests.transfer.cuda_memory import CudaMemory

    memory = CudaMemory(NUM_BLOCKS, BLOCK)
    mover = CudaMover(memory, memory.virtual, CudaDriver(memory.device), secret)
    network = TcpNetwork(memory, epoch, secret, timeout_s=5.0, retry_s=0.0, movers=[mover], sends_bytes=False)
    return Side(network, memory)


SIDES: dict[str, Callable[..., Side]] = {"tcp": tcp_side, "shm": shm_side, "nixl": nixl_side, "cuda": cuda_side}
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs nixl-cu12: make test-nixl")
MOVERS = ["tcp", "shm", pytest.param("nixl", marks=NEEDS_NIXL), pytest.param("cuda", marks=NEEDS_GPU)]


@contextmanager
def linked(puller: Side, lender: Side) -> Iterator[Pair]:
    lender.memory.fill()
    port = lender.network.listen("127.0.0.1", 0)
    try:
        yield Pair(puller, lender, f"127.0.0.1:{port}")
    finally:
        puller.network.close()
        lender.network.close()


def pair_of(mover: str) -> AbstractContextManager[Pair]:
    return linked(SIDES[mover](epoch="puller"), SIDES[mover](epoch="lender"))


def other_layout(**changes: object) -> Layout:
    return replace(Memory().layout, **changes)


def chain(count: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(count)]


def serve(pair: Pair, ticket: int, block_ids: Sequence[int]) -> int:
    """Wait for the ask and the room, and send these blocks; the peer."""
    from penstock.transfer.ports import Asked, Credited

    (asked,) = eventually(
        lambda: [e for e in pair.lender.events(Asked) if isinstance(e, Asked) and e.ask.ticket == ticket], len
    )
    eventually(lambda: [e for e in pair.lender.events(Credited) if isinstance(e, Credited) and e.ticket == ticket], len)
    assert isinstance(asked, Asked)
    pair.lender.network.send(asked.peer, ticket, 0, list(block_ids))
    return asked.peer

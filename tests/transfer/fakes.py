"""Fakes around KV transfer: block memory of bytes that a fake runner computes in, and a network that a test delays,
reorders, repeats and cuts."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.parking import MemoryChange
from penstock.engine.fake import FakeRunner
from penstock.sched.plan import StepHandle, StepPlan, StepResult
from penstock.transfer.host_memory import HostMemory, Parts
from penstock.transfer.messages import Ask, Ended, Layout
from penstock.transfer.ports import (
    Asked,
    Credited,
    Dropped,
    Event,
    Heard,
    Kept,
    Landed,
    PeerGone,
    Sent,
    Told,
)
from penstock.transfer.shared_memory import MemoryFile

TOKEN_BYTES = 8


def layout_of(block_size: int) -> Layout:
    return Layout("fake", "none", "int64", "none", "int64", block_size, "TP1", (), block_size * TOKEN_BYTES, 1)


class FakeMemory(HostMemory):
    """The blocks of a cache, as bytes: a token id in eight of them; -1: nothing was written there."""

    def __init__(self, num_blocks: int, block_size: int, file: MemoryFile | None = None) -> None:
        """`file`: memory that other processes can map; None: it is this process's own."""
        num_bytes = num_blocks * block_size * TOKEN_BYTES
        own = file.allocate(num_bytes) if file is not None else memoryview(bytearray(num_bytes))
        own[:] = b"\xff" * num_bytes
        super().__init__(Parts([own], [block_size * TOKEN_BYTES]), layout_of(block_size))

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Block by block."""
        (whole,), (size,) = self.parts.wholes, self.parts.sizes.tolist()
        return [whole[block_id * size : (block_id + 1) * size] for block_id in block_ids]

    def __getitem__(self, block_id: int) -> memoryview:
        return self.views([block_id])[0].cast("q")

    def __setitem__(self, block_id: int, token_ids: Sequence[int]) -> None:
        self[block_id][:] = memoryview(array("q", token_ids))


class MemoryRunner(FakeRunner):
    """Computes in a `FakeMemory`; with `overlaps` as late as a device may: when the step's result is read."""

    def __init__(
        self, num_blocks: int, block_size: int, *, vocab_size: int, overlaps: bool = False, host_blocks: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size, vocab_size=vocab_size, overlaps=overlaps, host_blocks=host_blocks)
        self.memory = FakeMemory(num_blocks + host_blocks, block_size)
        self._device_blocks = num_blocks
        self._slots: Any = self.memory

    def park(self) -> MemoryChange:
        for block_id in range(self._device_blocks):
            self.memory[block_id] = [-1] * self._block_size
        return MemoryChange()

    def submit(self, plan: StepPlan) -> StepHandle:
        return _LateStep(self, plan) if self.overlaps else super().submit(plan)

    def run_now(self, plan: StepPlan) -> StepResult:
        return super().submit(plan).result()


class _LateStep:
    def __init__(self, runner: MemoryRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan

    def choose(self) -> None: ...

    def result(self) -> StepResult:
        return self._runner.run_now(self._plan)


@dataclass
class _Flight:
    """Something on its way. Those of one connection, direction and ticket arrive in order."""

    lane: tuple[object, ...]
    act: Any  # called when it arrives
    is_repeatable: bool = False


@dataclass
class FakeWeb:
    """Networks that know each other by address. Nothing arrives before `deliver`."""

    dice: random.Random
    networks: dict[str, FakeNetwork] = field(default_factory=dict)
    flights: list[_Flight] = field(default_factory=list)
    num_peers: int = 0

    def network(self, address: str, memory: FakeMemory) -> FakeNetwork:
        made = self.networks[address] = FakeNetwork(self, address, memory)
        return made

    def deliver(self, count: int = 1) -> None:
        """Delivers so many of what is on its way, from any lane."""
        for _ in range(count):
            if not self.flights:
                return
            heads: dict[tuple[object, ...], _Flight] = {}
            for flight in self.flights:
                heads.setdefault(flight.lane, flight)
            chosen = self.dice.choice(list(heads.values()))
            if not (chosen.is_repeatable and self.dice.random() < 0.2):  # else it comes again
                self.flights.remove(chosen)
            chosen.act()

    def cut(self, connection: Connection) -> None:
        """Both sides notice. Nothing of it is read or written afterwards."""
        self.flights = [flight for flight in self.flights if flight.lane[0] is not connection]
        connection.is_cut = True
        connection.lender.events.append(PeerGone(connection.peer))
        connection.lender.takers.pop(connection.peer, None)
        connection.puller.sources.pop(connection.lender.address, None)
        for ticket in [t for t, each in connection.puller.tickets.items() if each is connection]:
            connection.puller.over(Ended(ticket, "cut"))


@dataclass(eq=False)
class Connection:
    puller: FakeNetwork
    lender: FakeNetwork
    peer: int
    is_cut: bool = False
    places: dict[int, list[int]] = field(default_factory=dict)


class FakeNetwork:
    """`Network` on a `FakeWeb`."""

    def __init__(self, web: FakeWeb, address: str, memory: FakeMemory) -> None:
        self.web, self.address, self.memory = web, address, memory
        self.events: deque[Event] = deque()
        self.sources: dict[str, Connection] = {}
        self.takers: dict[int, Connection] = {}
        self.tickets: dict[int, Connection | None] = {}  # None: to nobody
        self.told: list[int] = []
        self.asked: list[int] = []

    def take(self) -> list[Event]:
        events = [*self.events]
        self.events.clear()
        return events

    def wait(self, timeout_s: float) -> None: ...

    def sources_by_mover(self) -> dict[str, int]:
        return {"fake": len(self.sources)}

    @property
    def connections(self) -> list[Connection]:
        return [*self.sources.values(), *self.takers.values()]

    # -- to who has blocks

    def ask(self, address: str, ask: Ask) -> None:
        self.asked.append(ask.ticket)
        lender = self.web.networks.get(address)
        if lender is None:
            self.tickets[ask.ticket] = None
            told = Ended(ask.ticket, "nobody is there")
            self.web.flights.append(_Flight(("nobody", ask.ticket), lambda: self.over(told)))
            return
        connection = self.sources.get(address)
        if connection is None:
            self.web.num_peers += 1
            connection = self.sources[address] = Connection(self, lender, self.web.num_peers)
            lender.takers[connection.peer] = connection
        self.tickets[ask.ticket] = connection
        self._up(connection, ask.ticket, Asked(connection.peer, ask))

    def _up(self, connection: Connection, ticket: int, event: Event, *, is_repeatable: bool = False) -> None:
        flight = _Flight((connection, "up", ticket), lambda: connection.lender.events.append(event), is_repeatable)
        self.web.flights.append(flight)

    def land(self, ticket: int, block_ids: Sequence[int]) -> None:
        if (connection := self.tickets.get(ticket)) is not None:
            connection.places[ticket] = list(block_ids)
            self._up(connection, ticket, Credited(connection.peer, ticket, len(block_ids)), is_repeatable=True)

    def drop(self, ticket: int) -> None:
        if (connection := self.tickets.get(ticket)) is not None:
            self._up(connection, ticket, Dropped(connection.peer, ticket), is_repeatable=True)

    def keep(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if (connection := self.tickets.get(ticket)) is not None:
                self._up(connection, ticket, Kept(connection.peer, [ticket]), is_repeatable=True)

    def hang_up(self, ticket: int) -> None:
        if (connection := self.tickets.get(ticket)) is not None:
            self.web.cut(connection)

    def over(self, ended: Ended) -> None:
        if ended.ticket in self.tickets:
            del self.tickets[ended.ticket]
            self.told.append(ended.ticket)
            self.events.append(Told(ended))

    # -- to who pulls

    def send(self, peer: int, ticket: int, first: int, block_ids: Sequence[int]) -> None:
        if (connection := self.takers.get(peer)) is None:
            return
        block_ids = list(block_ids)

        def read() -> None:
            content = [bytes(view) for view in self.memory.views(block_ids)]
            self.events.append(Sent(peer, ticket, len(block_ids)))
            self._down(connection, ticket, lambda: connection.puller.landed(connection, ticket, first, content))

        self.web.flights.append(_Flight((connection, "read", ticket), read))

    def end(self, peer: int, ended: Ended) -> None:
        if (connection := self.takers.get(peer)) is not None:

            def read() -> None:  # after what is to be read before it
                self._down(connection, ended.ticket, lambda: connection.puller.over(ended))

            self.web.flights.append(_Flight((connection, "read", ended.ticket), read))

    def working(self, peer: int, tickets: Sequence[int]) -> None:
        if (connection := self.takers.get(peer)) is not None:
            event = Heard(list(tickets))
            self._down(connection, -1, lambda: connection.puller.events.append(event))

    def _down(self, connection: Connection, ticket: int, act: Any) -> None:
        self.web.flights.append(_Flight((connection, "down", ticket), act))

    def landed(self, connection: Connection, ticket: int, first: int, content: list[bytes]) -> None:
        places = connection.places.get(ticket)
        if self.tickets.get(ticket) is not connection or places is None or first + len(content) > len(places):
            return
        for view, data in zip(self.memory.views(places[first : first + len(content)]), content, strict=True):
            view[:] = data
        self.events.append(Landed(ticket, first, len(content)))

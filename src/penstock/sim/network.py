"""The network that KV blocks go over, in simulated time: latency and bandwidth, and no bytes.

Each replica has one link, as fast in as out, on which blocks go one after the other. Messages take the latency alone.
What one side says to the other arrives in the order it was said. It knows neither blocks' content nor when a step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.sim.events import Events
from penstock.transfer.messages import Ask, Ended
from penstock.transfer.ports import Asked, Credited, Dropped, Event, Heard, Kept, Landed, PeerGone, Sent, Told

_GONE = "the engine is gone"


@dataclass(frozen=True)
class KvLink:
    gb_s: float = 50.0  # each way: 400 for NVLink or CUDA IPC, 50 for 400 Gbit/s of InfiniBand, 12.5 for 100 GbE
    latency_s: float = 50e-6

    def __post_init__(self) -> None:
        if self.gb_s <= 0:
            raise ConfigError(f"a link of {self.gb_s:g} GB/s moves nothing: more than 0 is needed", param="kv_gb_s")
        if self.latency_s < 0:
            raise ConfigError(f"a latency of {self.latency_s:g} s would be before its cause", param="latency_s")

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / (self.gb_s * 1e9)


@dataclass(eq=False)
class Connection:
    """A connection from an engine that pulls to one that has blocks."""

    number: int
    puller: SimNetwork
    lender: SimNetwork
    tickets: set[int] = field(default_factory=set)  # that no end was told of
    last_s: float = 0.0  # when what was last sent to the puller arrives
    is_open: bool = True


class SimFabric:
    """All replicas that can reach each other, by address."""

    def __init__(self, events: Events, link: KvLink) -> None:
        self.link = link
        self.events = events
        self.members: dict[str, SimNetwork] = {}
        self._count = 0

    def connect(self, puller: SimNetwork, address: str) -> Connection | None:
        lender = self.members.get(address)
        if lender is None:
            return None
        self._count += 1
        return Connection(self._count, puller, lender)


class SimNetwork:
    """One engine's end of it, as `transfer.ports.Network`. `wake` is called when there is something to take."""

    def __init__(self, fabric: SimFabric, address: str, block_bytes: int, wake: Callable[[], None]) -> None:
        self._fabric = fabric
        self._events = fabric.events
        self._link = fabric.link
        self._address = address
        self._block_bytes = block_bytes
        self._wake = wake
        self._inbox: list[Event] = []
        self._asked: dict[str, Connection] = {}  # by address
        self._by_ticket: dict[int, Connection] = {}
        self._asking: dict[int, Connection] = {}  # those that pull from here, by number
        self._free_out_s = self._free_in_s = 0.0
        fabric.members[address] = self

    def close(self) -> None:
        """Its process is gone, and its connections with it."""
        if self._fabric.members.get(self._address) is self:
            del self._fabric.members[self._address]
        for connection in [*self._asked.values(), *self._asking.values()]:
            self._break(connection)

    # -- what comes

    def take(self) -> list[Event]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def sources_by_mover(self) -> dict[str, int]:
        return {"sim": len(self._asked)}

    def wait(self, timeout_s: float) -> None:
        """Nobody waits here: time moves by events."""

    def _arrive(self, event: Event) -> None:
        self._inbox.append(event)
        self._wake()

    # -- to who has blocks

    def ask(self, address: str, ask: Ask) -> None:
        connection = self._asked.get(address)
        if connection is None or not connection.is_open:
            connection = self._fabric.connect(self, address)
            if connection is None:
                self._events.after(self._link.latency_s, self._arrive, Told(Ended(ask.ticket, _GONE)))
                return
            self._asked[address] = connection
            connection.lender._asking[connection.number] = connection
        connection.tickets.add(ask.ticket)
        self._by_ticket[ask.ticket] = connection
        self._tell(connection, Asked(connection.number, ask))

    def land(self, ticket: int, block_ids: Sequence[int]) -> None:
        if (connection := self._by_ticket.get(ticket)) is not None:
            self._tell(connection, Credited(connection.number, ticket, len(block_ids)))

    def drop(self, ticket: int) -> None:
        if (connection := self._by_ticket.get(ticket)) is not None:
            self._tell(connection, Dropped(connection.number, ticket))

    def keep(self, tickets: Sequence[int]) -> None:
        for connection in {self._by_ticket[ticket] for ticket in tickets if ticket in self._by_ticket}:
            its = [ticket for ticket in tickets if ticket in connection.tickets]
            self._tell(connection, Kept(connection.number, its))

    def hang_up(self, ticket: int) -> None:
        if (connection := self._by_ticket.get(ticket)) is not None:
            self._break(connection)

    def _tell(self, connection: Connection, event: Event) -> None:
        self._events.after(self._link.latency_s, self._hand_over, connection, event)

    def _hand_over(self, connection: Connection, event: Event) -> None:
        if connection.is_open:
            connection.lender._arrive(event)

    # -- to who pulls

    def send(self, peer: int, ticket: int, first: int, block_ids: Sequence[int]) -> None:
        connection = self._asking.get(peer)
        if connection is None:
            return
        puller, count = connection.puller, len(block_ids)
        began_s = max(self._events.now, self._free_out_s, puller._free_in_s)
        end_s = self._free_out_s = puller._free_in_s = began_s + self._link.seconds(count * self._block_bytes)
        self._events.at(end_s, self._sent, connection, Sent(peer, ticket, count))
        self._answer(connection, Landed(ticket, first, count), end_s)

    def end(self, peer: int, ended: Ended) -> None:
        if (connection := self._asking.get(peer)) is not None:
            self._answer(connection, Told(ended), self._events.now)

    def working(self, peer: int, tickets: Sequence[int]) -> None:
        if (connection := self._asking.get(peer)) is not None:
            self._answer(connection, Heard([*tickets]), self._events.now)

    def _sent(self, connection: Connection, event: Sent) -> None:
        if connection.is_open:
            self._arrive(event)

    def _answer(self, connection: Connection, event: Event, sent_s: float) -> None:
        """It comes after all that was said before it on this connection."""
        connection.last_s = max(connection.last_s, sent_s + self._link.latency_s)
        self._events.at(connection.last_s, self._hear, connection, event)

    def _hear(self, connection: Connection, event: Event) -> None:
        if not connection.is_open:
            return
        if isinstance(event, Told):
            connection.tickets.discard(event.ended.ticket)
            connection.puller._by_ticket.pop(event.ended.ticket, None)
        connection.puller._arrive(event)

    # -- ends

    def _break(self, connection: Connection) -> None:
        """Nothing goes over it any more; both sides hear of it."""
        connection.is_open = False
        puller, lender = connection.puller, connection.lender
        if puller._asked.get(lender._address) is connection:
            del puller._asked[lender._address]
        lender._asking.pop(connection.number, None)
        for ticket in sorted(connection.tickets):
            del puller._by_ticket[ticket]
            self._events.after(self._link.latency_s, puller._arrive, Told(Ended(ticket, _GONE)))
        connection.tickets.clear()
        self._events.after(self._link.latency_s, lender._arrive, PeerGone(connection.number))

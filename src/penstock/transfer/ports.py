"""Ports of the two policies of this package (`lending`, `pulling`) and of the engine's thread: the network to
other engines, and the memory that blocks lie in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from penstock.transfer.messages import Ask, Ended, Layout


class Asked(msgspec.Struct, frozen=True):
    peer: int
    ask: Ask


class Credited(msgspec.Struct, frozen=True):
    peer: int
    ticket: int
    blocks: int


class Kept(msgspec.Struct, frozen=True):
    peer: int
    tickets: list[int]


class Dropped(msgspec.Struct, frozen=True):
    peer: int
    ticket: int


class Sent(msgspec.Struct, frozen=True):
    """These blocks are read, and their memory is not looked at any more."""

    peer: int
    ticket: int
    count: int


class PeerGone(msgspec.Struct, frozen=True):
    """One that pulled from here; none of its blocks is being read any more, or what is read of them is not believed."""

    peer: int


class Landed(msgspec.Struct, frozen=True):
    """These blocks are here, whole and verified."""

    ticket: int
    first: int
    count: int


class Told(msgspec.Struct, frozen=True):
    """No more blocks come, and nobody writes here for this ticket any more."""

    ended: Ended


class Heard(msgspec.Struct, frozen=True):
    tickets: list[int]


Event = Asked | Credited | Kept | Dropped | Sent | PeerGone | Landed | Told | Heard


class Network(Protocol):
    """Connections to other engines, in threads of their own. No call waits; `take` has what came of them."""

    def take(self) -> list[Event]: ...

    def wait(self, timeout_s: float) -> None:
        """Until there is something to take."""

    def sources_by_mover(self) -> dict[str, int]:
        """Engines that this one is connected to, to pull from, by the mover of their blocks."""

    # -- to who has blocks

    def ask(self, address: str, ask: Ask) -> None:
        """Exactly one `Told` follows, whatever happens."""

    def land(self, ticket: int, block_ids: Sequence[int]) -> None:
        """Where the blocks of a ticket go, in order: there is room for so many."""

    def drop(self, ticket: int) -> None:
        """Nobody wants the rest. `Told` comes once nothing is written any more."""

    def keep(self, tickets: Sequence[int]) -> None:
        """Tell whoever has them that they are still wanted."""

    def hang_up(self, ticket: int) -> None:
        """The engine behind this ticket is silent: all tickets there end."""

    # -- to who pulls

    def send(self, peer: int, ticket: int, first: int, block_ids: Sequence[int]) -> None:
        """`Sent` follows, or `PeerGone`."""

    def end(self, peer: int, ended: Ended) -> None: ...

    def working(self, peer: int, tickets: Sequence[int]) -> None: ...


class Staged(Protocol):
    """Bytes of some blocks in host memory, to be sent from there or received into it."""

    @property
    def views(self) -> list[memoryview]: ...

    def checksum(self, identity: bytes) -> int:
        """A checksum of the bytes, and of what they are said to be."""


class BlockMemory(Protocol):
    """Blocks as bytes. Any thread may call."""

    @property
    def layout(self) -> Layout: ...

    def reading(self, block_ids: Sequence[int]) -> AbstractContextManager[Staged]: ...

    def writing(self, block_ids: Sequence[int]) -> AbstractContextManager[Staged]:
        """The content of `views` at the end is in the blocks then, unless there was an exception."""


class Unreachable(Exception):
    """A mover cannot reach another engine's memory; the message says why."""


class RemoteMemory(Protocol):
    """Blocks of another engine, as this process reaches them."""

    def copy(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Into blocks of our own; it is done, or given up for good, when this returns. Raises Unreachable."""

    def close(self) -> None:
        """Nothing of the other engine is kept."""


class Mover(Protocol):
    """A way by which an engine reads blocks of another one's memory by itself, after it was told where they lie.

    What is read, when, and for how long it is held is not the mover's affair. TCP needs none: there bytes follow the
    message. Any thread may call.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """It works within one machine only."""

    @property
    def message_bytes(self) -> int:
        """Blocks that one message tells of, so that tickets take turns: some milliseconds of copying."""

    def offer(self) -> bytes:
        """The facts that another engine needs to reach this one's memory. Raises Unreachable."""

    def open(self, handle: bytes) -> RemoteMemory:
        """The memory of an engine that offered this. Raises Unreachable."""

    def close(self) -> None:
        """Nobody is handed the memory any more, until it is offered again. Whoever reaches it still does."""

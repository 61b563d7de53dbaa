"""Graceful shutdown without losing anything: no new work is taken, and what runs has until the server's patience ends.

A gateway that has another replica for a stream asks for it back, and carries it on there; one that has none leaves it
here. Only a drain that has a reason of the replica's own gives all of them back at once. That one cannot be taken back,
nor one that ends the process; a drain that somebody asked for can. A parked replica takes nothing either, whether or
not it drained before; it takes work again once it is awake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Protocol

from penstock.core.errors import Conflict, EngineUnavailable

_RETRY_AFTER_S = 5.0
_ASKED = "this replica is draining"


class Running(Protocol):
    """Work for a request."""

    def give_back(self, error: EngineUnavailable) -> None:
        """Ends it here and now: it goes on elsewhere."""


class Admitted:
    """Work that a drain waits for, from the beginning of the context to its end. Entering raises when no new work is
    taken."""

    __slots__ = ("_drain", "_generation", "_relayed_as")

    def __init__(self, drain: Drain, generation: Running, relayed_as: str) -> None:
        self._drain = drain
        self._generation = generation
        self._relayed_as = relayed_as

    def __enter__(self) -> None:
        self._drain.enter(self._generation, self._relayed_as)

    def __exit__(self, *error: object) -> None:
        self._drain.leave(self._generation)


class Drain:
    def __init__(self) -> None:
        self.is_stopping = False  # the process ends as soon as nothing is open
        self.parked = ""  # in words, from the first moment of parking to the last of waking
        self._is_asked = False
        self._reason = ""  # of the replica's own
        self._running: dict[Running, str] = {}  # with the id that its gateway knows it by; empty: it stays here
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_over(self) -> bool:
        """The process ends, and nothing runs any more."""
        return self.is_stopping and not self._running

    @property
    def is_begun(self) -> bool:
        return self._is_asked or bool(self.parked)

    @property
    def reason(self) -> str:
        return self._reason or self.parked or _ASKED

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def begin(self, reason: str | None = None, *, is_stopping: bool = False) -> None:
        if reason is not None:
            self._reason = self._reason or reason
        self._is_asked = True
        self.is_stopping |= is_stopping
        if reason is not None:
            self.give_back(set(self._running.values()))

    def give_back(self, ids: Set[str]) -> None:
        """End these streams here and now: whoever asked for them can go on elsewhere."""
        for generation, relayed_as in self._running.items():
            if relayed_as and relayed_as in ids:
                generation.give_back(self._refusal())

    def cancel(self) -> None:
        """New work is taken again. Raises where the process ends, the drain had a reason of its own, or the replica is
        parked."""
        self.check_lasting()
        if self.parked:
            raise Conflict(self.parked)
        self._is_asked = False

    def check_lasting(self) -> None:
        """Raises where new work will never be taken again."""
        if self.is_stopping or self._reason:
            raise Conflict("this replica is stopping" if self.is_stopping else self._reason)

    def check(self) -> None:
        """Raises when no new work is taken."""
        if self.is_begun:
            raise self._refusal()

    def admit(self, generation: Running, relayed_as: str) -> Admitted:
        """A context for as long as it runs. `relayed_as`: id of a stream that may go on elsewhere."""
        return Admitted(self, generation, relayed_as)

    def enter(self, generation: Running, relayed_as: str) -> None:
        """Raises when no new work is taken."""
        self.check()
        self._running[generation] = relayed_as
        self._is_idle.clear()

    def leave(self, generation: Running) -> None:
        del self._running[generation]
        if not self._running:
            self._is_idle.set()

    def _refusal(self) -> EngineUnavailable:
        return EngineUnavailable(self.reason, retry_after_s=_RETRY_AFTER_S)

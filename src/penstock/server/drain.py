"""Going away without losing anything: no new work, and streams that can be carried on elsewhere are given back at once.

Everything else has until the server's patience ends. A drain that somebody asked for can be taken back; one that has a
reason of the replica's own, or ends the process, cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import Conflict, EngineUnavailable
from penstock.server.generation import Generation

_RETRY_AFTER_S = 5.0
_ASKED = "this replica is draining"


class Drain:
    def __init__(self) -> None:
        self.is_begun = False
        self.is_stopping = False  # the process ends as soon as nothing is open
        self.reason = _ASKED
        self._relayed: set[Generation] = set()

    def begin(self, reason: str | None = None, *, is_stopping: bool = False) -> None:
        if reason is not None and self.reason == _ASKED:
            self.reason = reason
        self.is_begun = True
        self.is_stopping |= is_stopping
        for generation in self._relayed:
            generation.give_back(self._refusal())

    def cancel(self) -> None:
        """New work is taken again. Raises where the process ends, or the drain had a reason of its own."""
        if self.is_stopping or self.reason != _ASKED:
            raise Conflict("this replica is stopping" if self.is_stopping else self.reason)
        self.is_begun = False

    def check(self) -> None:
        """Raises when no new work is taken."""
        if self.is_begun:
            raise self._refusal()

    @contextmanager
    def admit(self, generation: Generation, *, is_relayed: bool) -> Iterator[None]:
        """While it runs. Raises when no new work is taken."""
        self.check()
        if is_relayed:
            self._relayed.add(generation)
        try:
            yield
        finally:
            self._relayed.discard(generation)

    def _refusal(self) -> EngineUnavailable:
        return EngineUnavailable(self.reason, retry_after_s=_RETRY_AFTER_S)

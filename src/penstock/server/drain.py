"""Going away without losing anything: no new work, and streams that can be carried on elsewhere are given back at once.

Everything else has until the server's patience ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import EngineUnavailable
from penstock.server.generation import Generation

_RETRY_AFTER_S = 5.0


class Drain:
    def __init__(self) -> None:
        self.is_begun = False
        self.is_stopping = False  # the process ends as soon as nothing is open
        self.reason = "this replica is draining"
        self._relayed: set[Generation] = set()

    def begin(self, reason: str | None = None, *, is_stopping: bool = False) -> None:
        if not self.is_begun:
            self.reason = reason or self.reason
        self.is_begun = True
        self.is_stopping |= is_stopping
        for generation in self._relayed:
            generation.give_back(self._refusal())

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

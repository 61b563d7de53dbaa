"""Retries: how often a request may go elsewhere; and how many second tries a gateway may make: a share of its requests,
so that retries never become the load."""

from __future__ import annotations

import msgspec

from penstock.health.quarantine import Losses

_SHARE = 0.2
_MOST = 512.0  # in hand: a replica that dies takes all its requests with it
_MAX_TRIES = 3
_BACKOFF_S = 0.05  # at most, before the second try; doubled for the third
_MAX_MOVES = 10  # of a stream that has begun: replicas that drain are not lost (`quarantine`), and are no end either


class RetryBudget:
    def __init__(self, share: float = _SHARE, most: float = _MOST) -> None:
        self._share = share
        self._most = most
        self._left = most

    def earn(self) -> None:
        left = self._left + self._share
        self._left = left if left < self._most else self._most

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Tries(msgspec.Struct, eq=False):
    """The attempts of one request for one model; `losses` are of all models that it went to."""

    losses: Losses = msgspec.field(default_factory=Losses)
    replicas: set[str] = msgspec.field(default_factory=set)  # where it has been since one last answered
    _num_moves: int = 0

    def answered(self, replica_id: str) -> None:
        if len(self.replicas) > 1:
            self.replicas = {replica_id}

    def retry(self, budget: RetryBudget) -> bool:
        """Whether it may go elsewhere before the client has seen anything; that takes from the budget."""
        return len(self.replicas) < _MAX_TRIES and budget.take()

    @property
    def max_backoff_s(self) -> float:
        return _BACKOFF_S * (1 << len(self.replicas) - 1)

    @property
    def may_move(self) -> bool:
        return self._num_moves < _MAX_MOVES

    def move(self) -> bool:
        """Whether it may go on elsewhere after that. No budget: hundreds of streams may lose a replica at once."""
        is_allowed = self.may_move
        self._num_moves += 1
        return is_allowed

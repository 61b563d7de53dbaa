"""How many second tries a gateway may make: a share of its requests, so that retries never become the load."""

from __future__ import annotations

_SHARE = 0.2
_MOST = 512.0  # in hand: a replica that dies takes all its requests with it


class RetryBudget:
    def __init__(self, share: float = _SHARE, most: float = _MOST) -> None:
        self._share = share
        self._most = most
        self._left = most

    def earn(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True

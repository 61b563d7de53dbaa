"""The limiter as a gateway sees it, and the one for a single process: synchronous, in memory.

`Limiter` is what gateways are written against. An answer comes at once where the accounts are in this process and as a
future where another one must be asked; settling never waits and never fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from penstock.tenancy.limits.account import Account, Reservation
from penstock.tenancy.limits.quota import US, Quota, Refusal

SWEEP_EVERY = 1024  # new accounts between two looks for accounts that may be forgotten


class Held(Protocol):
    """A reservation, whoever keeps the books of it."""

    tokens: int


Answer = Held | Refusal


class Limiter(Protocol):
    def reserve(self, tenant: str, quota: Quota, tokens: int, *, caller: int = 0) -> Answer | asyncio.Future[Answer]:
        """Takes one request and `tokens` (the prompt's, plus the output limit) from all limits together, or nothing.

        `caller` is what a request keeps when it comes back after a refusal (a checksum of its body, say): a place is
        kept for it under this number.
        """

    def progress(self, held: Held, used: int) -> None:
        """So much is used already: what the tenant pays if this process dies before it settles."""

    def settle(self, held: Held, used: int) -> None:
        """The request ended, however it ended, and used this many tokens."""

    def release(self, held: Held) -> None:
        """The request never ran: everything comes back, the request itself too."""


class LocalLimiter:
    """All accounts in this process. `known_since`: what was given out before is not known (see `Account`)."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, *, known_since: float | None = None, retry_quantum_s: float = 1.0
    ) -> None:
        self._clock = clock
        self._known_since = None if known_since is None else round(known_since * US)
        self._quantum = round(retry_quantum_s * US)
        self._accounts: dict[str, Account] = {}
        self._sweep_at = SWEEP_EVERY

    def reserve(self, tenant: str, quota: Quota, tokens: int, *, caller: int = 0) -> Reservation | Refusal:
        now = int(self._clock() * US)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._open(tenant, quota, now)
        elif account.quota is not quota and account.quota != quota:
            account.change(quota, now)
        return account.reserve(tokens, caller, now)

    def progress(self, held: Held, used: int) -> None:
        assert isinstance(held, Reservation)
        held.used = used

    def settle(self, held: Held, used: int) -> None:
        assert isinstance(held, Reservation)
        if held.account is not None:
            held.account.settle(held, used, int(self._clock() * US))

    def release(self, held: Held) -> None:
        assert isinstance(held, Reservation)
        if held.account is not None:
            held.account.release(held, int(self._clock() * US))

    def restore(self, tenant: str, quota: Quota, tokens: int) -> Reservation:
        """Given out by an earlier limiter, and its request still runs: its slot counts, whatever the limits."""
        now = int(self._clock() * US)
        account = self._accounts.get(tenant) or self._open(tenant, quota, now)
        return account.restore(tokens, now)

    def in_use(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.in_use

    def _open(self, tenant: str, quota: Quota, now: int) -> Account:
        if len(self._accounts) >= self._sweep_at:
            self._accounts = {name: account for name, account in self._accounts.items() if not account.is_idle(now)}
            self._sweep_at = len(self._accounts) + SWEEP_EVERY
        account = self._accounts[tenant] = Account(quota, now, self._known_since, self._quantum)
        return account

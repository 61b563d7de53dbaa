"""The limiter as a gateway sees it, and the one for a single process: synchronous, in memory.

`Limiter` is what gateways are written against. An answer comes at once where the accounts are in this process and as a
future where another one must be asked; settling never waits and never fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

from penstock.tenancy.limits.quota import US, Quota, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation, TenantLimits
from penstock.tenancy.limits.window import Slot

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
        """Notes how much is used already: what the tenant pays if this process dies before it settles."""

    def settle(self, held: Held, used: int) -> None:
        """The request ended, however it ended, and used this many tokens."""

    def release(self, held: Held) -> None:
        """The request never ran: everything comes back, the request itself too."""


class LocalLimiter:
    """All accounts in this process. `slots`: what an earlier limiter admitted; `note` is told every change of one."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        *,
        retry_quantum_s: float = 1.0,
        slots: Mapping[str, Sequence[Slot]] | None = None,
        note: Callable[[str, Slot, int, int], None] | None = None,
    ) -> None:
        self._clock = clock
        self._quantum = round(retry_quantum_s * US)
        self._note = note
        self._accounts: dict[str, TenantLimits] = {}
        self._sweep_at = SWEEP_EVERY
        for tenant, found in (slots or {}).items():
            self._open(tenant, Quota(), self._now(), found)

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
            held.account.release(held, self._now())

    def restore(self, tenant: str, quota: Quota, tokens: int) -> Reservation:
        """Take over what an earlier limiter gave: its request still runs, and counts as open, whatever the limits."""
        now = self._now()
        account = self._accounts.get(tenant) or self._open(tenant, quota, now)
        return account.restore(tokens, now)

    def in_use(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.in_use

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Everything admitted lately, by tenant."""
        for tenant, account in self._accounts.items():
            for slot in account.slots:
                yield tenant, slot

    def _now(self) -> int:
        return int(self._clock() * US)

    def _open(self, tenant: str, quota: Quota, now: int, slots: Sequence[Slot] = ()) -> TenantLimits:
        if len(self._accounts) >= self._sweep_at:
            self._accounts = {name: account for name, account in self._accounts.items() if not account.is_idle(now)}
            self._sweep_at = len(self._accounts) + SWEEP_EVERY
        note = None if self._note is None else partial(self._note, tenant)
        account = self._accounts[tenant] = TenantLimits(quota, now, slots=slots, quantum=self._quantum, note=note)
        return account

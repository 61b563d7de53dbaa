"""A tenant's limits for one request: reserved on the way in, settled on the way out by what was really used.

What is reserved first is a bound, which costs nothing to know. Only if that is refused is the prompt counted, and the
limiter asked again, now as somebody for whom a place may be kept.

A large body costs its request before anything is done with it: `ENTRY` is the size of a request that nobody has looked
at yet. That reservation is released when the whole one is paid, or settled with nothing used if it never comes to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.gateway.proxy import refusals
from penstock.http.clock import TimerClock
from penstock.tenancy.limits.limiter import Answer, Held, Limiter
from penstock.tenancy.limits.quota import NOBODY, Quota, Reason, Refusal


class Sized(Protocol):
    """How large a request is, as far as it is known (`sizes`)."""

    is_final: bool
    most: int
    exact: int | None

    @property
    def reserved(self) -> int: ...

    def count(self, then: Callable[[PenstockError | None], None]) -> None: ...


@dataclass
class _Entry:
    is_final: bool = True
    most: int = 0
    exact: int | None = 0
    reserved: int = 0

    def count(self, then: Callable[[PenstockError | None], None]) -> None:
        then(None)


ENTRY = _Entry()

Paid = Callable[[PenstockError | None], None]

_WAIT_S, _MAX_WAITS = 0.05, 200  # for what was promised


def _tell_nobody(_: PenstockError | None) -> None: ...


class RateLimitReservation(msgspec.Struct, eq=False):
    _limiter: Limiter
    _clock: TimerClock
    _quota: Quota
    _tenant: str
    _size: Sized
    _fingerprint: int
    _paid: Paid  # called once, perhaps before `pay` returns: with None, or with why the request stays out
    _held: Held | None = None
    _num_waits: int = 0
    _is_open: bool = True

    def pay(self) -> None:
        if not self._is_open:
            return
        answer = self._limiter.reserve(
            self._tenant,
            self._quota,
            self._size.reserved,
            caller=NOBODY if self._is_bound else self._fingerprint,
        )
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda done: self._answered(done.result()))
        else:
            self._answered(answer)

    def progress(self, used: int) -> None:
        """So much is paid even if this process dies now."""
        if self._held is not None:
            self._limiter.progress(self._held, used)

    def settle(self, used: int | None) -> None:
        """The request is over, wherever it was. None: nobody worked for it."""
        self._is_open = False
        self._paid = _tell_nobody  # or the request and its reservation would hold each other
        held, self._held = self._held, None
        if held is None:
            return
        if used is None:
            self._limiter.release(held)
        else:
            self._limiter.settle(held, used)

    @property
    def _is_bound(self) -> bool:
        return self._quota.tokens is not None and not self._size.is_final

    def _answered(self, answer: Answer) -> None:
        if not isinstance(answer, Refusal):
            if self._is_open:
                self._held = answer
                self._paid(None)
            else:  # the client left while the limiter was asked
                self._limiter.release(answer)
        elif self._is_bound:
            self._look_closer(answer.reason)
        elif answer.is_due and self._num_waits < _MAX_WAITS:  # it came as told, perhaps a moment early
            self._num_waits += 1
            self._clock.call_later(_WAIT_S, self.pay)
        elif self._is_open:
            self._paid(refusals.limited(answer, self._size))

    def _look_closer(self, reason: Reason) -> None:
        """Looks again at what was refused for a bound: with its prompt counted, or with the final size."""
        if reason in (Reason.TOKENS, Reason.TOO_LARGE):
            self._size.count(self._counted)
        else:
            self._size.is_final = True
            self.pay()

    def _counted(self, error: PenstockError | None) -> None:
        if error is None:
            self.pay()
        elif self._is_open:
            self._paid(error)

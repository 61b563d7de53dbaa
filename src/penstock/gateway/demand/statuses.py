"""Pool statuses of controllers, in force at this gateway: when a replica is expected, and which models exist.

A status counts for `SILENT_AFTER_S` from when it last changed, by this gateway's clock: clocks of other machines may be
wrong. Then its pool is as any other. Belongs to the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from penstock.admission.admission import Admission
from penstock.admission.expected import Expected
from penstock.gateway.demand.reporter import SILENT_AFTER_S
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.tenancy.fleet import PoolStatus


class _Heard(NamedTuple):
    status: PoolStatus
    at: float  # by the gateway's clock


class PoolStatuses:
    def __init__(
        self,
        admission: Admission,
        queue: AdmissionQueue,
        now: Callable[[], float],
        manage: Callable[[Iterable[str]], object],
    ) -> None:
        """`manage` is told the pools that controllers have, whenever these change."""
        self._admission = admission
        self._queue = queue
        self._now = now
        self._manage = manage
        self._heard: dict[str, _Heard] = {}

    def apply(self, statuses: Mapping[str, PoolStatus]) -> None:
        """All there are, by pool. One that serves another pool's model beside it has no requests of its own."""
        now, pools = self._now(), set(self._heard)
        self._heard = {pool: self._hear(status, now) for pool, status in statuses.items() if not status.serves}
        self._admission.expect({pool: _expected(one) for pool, one in self._heard.items()}, now)
        if self._queue:
            self._queue.decide()
        if pools != self._heard.keys():
            self._manage(self._heard)

    def _hear(self, status: PoolStatus, now: float) -> _Heard:
        known = self._heard.get(status.pool)
        if known is None:  # it may have been there for long
            return _Heard(status, now - max(0.0, time.time() - status.at))
        return known if known.status.at == status.at else _Heard(status, now)


def _expected(heard: _Heard) -> Expected:
    status = heard.status
    ready_at = None if status.eta_s is None else heard.at + status.eta_s
    refusal = status.residency.refusal if status.residency is not None else ""
    return Expected(status.hold_s, ready_at, status.start_s, heard.at + SILENT_AFTER_S, refusal)

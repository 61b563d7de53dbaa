"""Demand as this gateway sees it at one moment, by pool. Belongs to the event loop's thread.

Requests pay for it with three additions: where they enter admission's queue, where they are refused there, and at their
end, when their facts are put aside for the tally.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from typing import NamedTuple

from penstock.admission.settings import CLASS_NAMES
from penstock.core.slo import Slo
from penstock.gateway.app import Gateway
from penstock.gateway.records.facts import RequestFacts

_MAX_ENDED = 1 << 16  # requests of a second: no process has more


class PoolReading(NamedTuple):
    arrivals: int  # since the gateway's start, as `refused`
    refused: int
    waiting: dict[str, int]  # by class
    waiting_tokens: int
    held: int
    in_flight: int
    oldest_wait_s: float
    slo: Slo


class Reading(NamedTuple):
    now: float  # by the gateway's clock
    at: float  # seconds since 1970
    pools: dict[str, PoolReading]
    ended: Collection[RequestFacts]  # since the last reading


class DemandMeter:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.recorder.put_aside = deque(maxlen=_MAX_ENDED)

    def read(self) -> Reading:
        gateway, in_flight = self._gateway, Counter[str]()
        now, recorder = gateway.now(), gateway.recorder
        for replica in gateway.replicas.values():
            in_flight[replica.model] += len(replica.in_flight)
        ended, recorder.put_aside = recorder.put_aside, deque(maxlen=_MAX_ENDED)
        pools = {pool: self._pool(pool, in_flight[pool], now) for pool in gateway.pools}
        return Reading(now, time.time(), pools, ended or ())

    def _pool(self, pool: str, in_flight: int, now: float) -> PoolReading:
        admission, queue = self._gateway.admission, self._gateway.queue
        waiting = admission.waiting(pool)
        by_class = {name: admission.num_waiting(pool, priority) for name, priority in CLASS_NAMES.items()}
        return PoolReading(
            arrivals=queue.arrivals[pool],
            refused=queue.refused[pool],
            waiting={name: count for name, count in by_class.items() if count},
            waiting_tokens=sum(item.request.prompt_tokens for item in waiting),
            held=len(waiting) if waiting and not admission.has_active(pool, now) else 0,
            in_flight=in_flight,
            oldest_wait_s=max((now - item.since for item in waiting), default=0.0),
            slo=admission.slo(pool),
        )

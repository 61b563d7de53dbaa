"""Readings of demand added up: the counters and quantiles of each pool, as rows of the store. Knows no clock."""

from __future__ import annotations

import math
from collections import deque

from penstock.api import server_timing
from penstock.core.slo import Slo
from penstock.gateway.demand.meter import PoolReading, Reading
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.tenancy.fleet import PoolDemand

WINDOW_S = 30.0
_MAX_TIMES = 4096  # of a window, the newest


class _Times:
    """A signal's values within the window."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=_MAX_TIMES)  # when, and the value

    def add(self, now: float, value: float) -> None:
        self._times.append((now, value))

    def quantile(self, q: float, now: float) -> float:
        """0: there are no values."""
        times = self._times
        while times and times[0][0] <= now - WINDOW_S:
            times.popleft()
        if not times:
            return 0.0
        values = sorted([value for _, value in times])
        return round(values[math.ceil(q * len(values)) - 1], 6)


class _Pool:
    def __init__(self) -> None:
        self.finished = self.prompt = self.cached = self.output = self.in_slo = self.out_of_slo = 0
        self.wait, self.ttft, self.tpot, self.latency = _Times(), _Times(), _Times(), _Times()

    def add(self, facts: RequestFacts, slo: Slo, now: float) -> None:
        """A request that ended, and was sent to a replica before."""
        ttft_s, total_s = facts.ttft_s, facts.total_s
        assert facts.queue_s is not None
        self.finished += 1
        self.prompt += facts.input_tokens
        self.cached += facts.cached_tokens
        self.output += facts.output_tokens
        if facts.is_batch:  # it waits for what others leave, however long that takes
            return
        in_engine_s = server_timing.decode(facts.parts).get("queue", 0.0) if facts.parts else 0.0
        self.wait.add(now, facts.queue_s + in_engine_s)
        tpot_s = None
        if ttft_s is not None:
            self.ttft.add(now, ttft_s)
            if total_s is not None and facts.output_tokens > 1:
                tpot_s = (total_s - ttft_s) / (facts.output_tokens - 1)
                self.tpot.add(now, tpot_s)
        if facts.ending is Ending.OK and total_s is not None:
            self.latency.add(now, total_s)
            is_kept = True
            for time_s, most_s in ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s), (total_s, slo.latency_s)):
                if time_s is not None and most_s is not None and time_s > most_s:
                    is_kept = False
            self.in_slo += is_kept
            self.out_of_slo += not is_kept
        elif facts.ending is Ending.FAILED:
            self.out_of_slo += 1


class DemandTally:
    """Belongs to the reporter's thread."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._pools: dict[str, _Pool] = {}

    def add(self, reading: Reading) -> list[PoolDemand]:
        """The rows of all pools as of this reading."""
        self._pools = {name: self._pools.get(name) or _Pool() for name in reading.pools}
        for facts in reading.ended:
            if facts.queue_s is not None and (pool := self._pools.get(facts.model)) is not None:
                pool.add(facts, reading.pools[facts.model].slo, reading.now)
        return [self._row(name, seen, reading) for name, seen in reading.pools.items()]

    def _row(self, name: str, seen: PoolReading, reading: Reading) -> PoolDemand:
        pool, now = self._pools[name], reading.now
        return PoolDemand(
            gateway=self._gateway,
            pool=name,
            at=reading.at,
            arrivals=seen.arrivals,
            finished=pool.finished,
            refused=seen.refused,
            prompt_tokens=pool.prompt,
            cached_tokens=pool.cached,
            output_tokens=pool.output,
            waiting=sum(seen.waiting.values()),
            waiting_by_class=seen.waiting,
            waiting_tokens=seen.waiting_tokens,
            held=seen.held,
            in_flight=seen.in_flight,
            oldest_wait_s=round(seen.oldest_wait_s, 3),
            wait_p95_s=pool.wait.quantile(0.95, now),
            ttft_p95_s=pool.ttft.quantile(0.95, now),
            tpot_p95_s=pool.tpot.quantile(0.95, now),
            latency_p99_s=pool.latency.quantile(0.99, now),
            in_slo=pool.in_slo,
            out_of_slo=pool.out_of_slo,
        )

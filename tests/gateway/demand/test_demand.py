"""Demand of pools: what a gateway counts of its requests, and when it writes that into a store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.gateway_calls import TURNS, Bench

from penstock.admission.admission import Admission
from penstock.core.slo import Slo
from penstock.gateway.app import Gateway
from penstock.gateway.demand.meter import DemandMeter, PoolReading, Reading
from penstock.gateway.demand.reporter import EVERY_S, RARELY_S, DemandReporter
from penstock.gateway.demand.tally import WINDOW_S, DemandTally
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.settings.gateway import ModelSettings, routes_of
from penstock.gateway.tenant_services import TenantServices
from penstock.router.request import EdgeRequest
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.fleet import PoolDemand, PoolStatus, write_pool
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.limits.limiter import LocalLimiter
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.usage import Usage
from tests.clocks import ManualClock
from tests.waiting import eventually_async

SLO = Slo(ttft_s=1.0, tpot_s=0.1, latency_s=None)


class NoUsage:
    def record(self, usage: Usage) -> None: ...


def empty_gateway(clock: ManualClock, hold_s: float | None = None) -> Gateway:
    """Of one pool, which has no replicas."""
    services = TenantServices(KeyRing(), LocalLimiter(clock.now), Budgets(), NoUsage())
    gateway = Gateway(routes_of({"m": ModelSettings()}), services, Admission(), clock=clock)
    gateway.admission.configure({}, {} if hold_s is None else {"m": hold_s})
    _ = gateway.pools["m"]
    return gateway


class Waiter:
    def __init__(self, number: int, tokens: int) -> None:
        self.request = EdgeRequest(f"r{number}", "m", tokens, 16)
        self.decisions: list[object] = []

    def decided(self, decision: object) -> None:
        self.decisions.append(decision)

    def held(self) -> None: ...


def reading(now: float, *ended: RequestFacts) -> Reading:
    return Reading(now, 5000.0 + now, {"m": PoolReading(9, 2, {"batch": 1}, 70, 0, 3, 1.5, SLO)}, ended)


def facts(ending: Ending = Ending.OK, **values: object) -> RequestFacts:
    known = {"model": "m", "queue_s": 0.01, "ttft_s": 0.5, "total_s": 2.0, "input_tokens": 10, "output_tokens": 31}
    return RequestFacts("id", "chat/completions", ending, **(known | values))  # type: ignore[arg-type]


def test_a_row_has_counters_gauges_and_quantiles() -> None:
    ended = [facts(ttft_s=0.01 * number, cached_tokens=4) for number in range(1, 101)]
    (row,) = DemandTally("g").add(reading(0.0, *ended))
    assert (row.gateway, row.pool, row.at, row.arrivals, row.refused) == ("g", "m", 5000.0, 9, 2)
    assert (row.finished, row.prompt_tokens, row.cached_tokens, row.output_tokens) == (100, 1000, 400, 3100)
    assert (row.waiting, row.waiting_by_class, row.waiting_tokens, row.in_flight) == (1, {"batch": 1}, 70, 3)
    assert (row.ttft_p95_s, row.latency_p99_s, row.oldest_wait_s) == (0.95, 2.0, 1.5)
    assert row.tpot_p95_s == pytest.approx((2.0 - 0.06) / 30, abs=1e-6)


def test_the_wait_before_prefill_includes_the_replicas_own_queue() -> None:
    (row,) = DemandTally("g").add(reading(0.0, facts(parts=b"tokenize;dur=1.0, queue;dur=250.0, prefill;dur=9.0")))
    assert row.wait_p95_s == pytest.approx(0.26)


def test_quantiles_are_of_the_last_seconds_and_counters_of_all_time() -> None:
    tally = DemandTally("g")
    tally.add(reading(0.0, facts()))
    (row,) = tally.add(reading(WINDOW_S, facts(ttft_s=0.2)))
    assert (row.finished, row.ttft_p95_s) == (2, 0.2)
    (row,) = tally.add(reading(2 * WINDOW_S))
    assert (row.finished, row.ttft_p95_s, row.wait_p95_s, row.latency_p99_s) == (2, 0.0, 0.0, 0.0)


def test_a_request_keeps_its_objectives_misses_them_or_says_nothing() -> None:
    rows = DemandTally("g").add(
        reading(
            0.0,
            facts(),
            facts(ttft_s=1.1),
            facts(total_s=30.0),  # of its tokens
            facts(ttft_s=None, total_s=100.0),  # no stream, and no objective for the whole
            facts(Ending.FAILED),
            facts(Ending.CLIENT_GONE),
            facts(Ending.REFUSED, queue_s=None),  # it never was at a replica
        )
    )
    assert (rows[0].finished, rows[0].in_slo, rows[0].out_of_slo) == (6, 2, 3)


async def test_requests_are_counted_without_a_python_call() -> None:
    bench = Bench()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    for _ in range(50):  # metrics open their series, caches fill
        bench.run(bench.exchange(0, stream=True), stream=True)

    def calls() -> dict[str, int]:
        """Where requests are counted; others have caches."""
        where = ("gateway/demand/", "gateway/records/recorder.py", "gateway/proxy/admission_queue.py")
        return {name: count for name, count in bench.calls(stream=True).items() if name.startswith(where)}

    before = calls()
    meter = DemandMeter(bench.gateway)
    assert calls() == before
    seen = meter.read()
    assert (seen.pools["m"].arrivals, seen.pools["m"].in_flight, len(seen.ended)) == (52, 0, 1)
    (row,) = DemandTally("g").add(seen)
    assert (row.finished, row.prompt_tokens, row.output_tokens, row.in_slo) == (1, 12, 8, 1)
    bench.gateway.close()


async def test_requests_that_wait_for_want_of_a_replica_are_held_and_others_refused() -> None:
    clock = ManualClock()
    gateway = empty_gateway(clock, hold_s=20.0)
    meter = DemandMeter(gateway)
    for number in range(2):
        gateway.queue.submit(Waiter(number, 100))
        clock.advance(1.5)
    seen = meter.read().pools["m"]
    assert (seen.arrivals, seen.held, seen.waiting, seen.waiting_tokens) == (2, 2, {"standard": 2}, 200)
    assert seen.oldest_wait_s == pytest.approx(3.0)
    clock.advance(20.0)
    seen = meter.read().pools["m"]
    assert (seen.held, seen.refused) == (0, 2)
    gateway.close()


class Reported:
    """A reporter at work on a store, with a clock that is moved here."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.statuses: list[Mapping[str, PoolStatus]] = []
        self.gateway = empty_gateway(self.clock)
        self.reporter = DemandReporter(store.fleet, DemandMeter(self.gateway), self.clock, self.statuses.append)

    async def pass_time(self, seconds: float) -> list[PoolDemand]:
        """The rows in the store when the thread has done what was due."""
        num_heard = len(self.statuses)
        self.clock.advance(seconds)
        await eventually_async(lambda: len(self.statuses), lambda num: num > num_heard)
        return self.store.fleet.demand()

    def manage(self, at: float) -> None:
        self.store.fleet.take_lease("f", "me", None)
        lease = self.store.fleet.lease("f")
        assert lease is not None
        with self.store.fleet.fenced("f", lease) as execute:
            write_pool(execute, PoolStatus("m", at, hold_s=60.0))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path / 'penstock.db'}")


async def test_pools_without_a_controller_are_written_rarely_and_those_with_one_every_second(store: Store) -> None:
    reported = Reported(store)
    reported.reporter.start()
    (first,) = await reported.pass_time(EVERY_S)
    assert (first.pool, first.gateway) == ("m", reported.reporter.gateway)
    for _ in range(3):
        assert await reported.pass_time(EVERY_S) == [first]
    reported.manage(first.at)
    assert await reported.pass_time(EVERY_S) == [first]
    assert reported.statuses[-1]["m"].hold_s == 60.0
    (second,) = await reported.pass_time(EVERY_S)
    assert second.at > first.at
    reported.reporter.close()
    assert store.fleet.demand() == []
    reported.gateway.close()


async def test_the_first_request_that_is_held_is_reported_at_once(store: Store) -> None:
    reported = Reported(store)
    reported.gateway.admission.configure({}, {"m": 20.0})
    reported.manage(time.time())
    reported.gateway.queue.first_held = reported.reporter.report_now
    reported.reporter.start()
    await reported.pass_time(EVERY_S)
    await reported.pass_time(EVERY_S)
    reported.clock.advance(EVERY_S / 2)
    reported.gateway.queue.submit(Waiter(0, 100))
    await eventually_async(lambda: [row.held for row in store.fleet.demand()], lambda held: held == [1])
    reported.reporter.close()
    reported.gateway.close()


async def test_a_controller_that_is_silent_makes_no_writes(store: Store) -> None:
    reported = Reported(store)
    reported.manage(at=1.0)  # in 1970
    reported.reporter.start()
    (first,) = await reported.pass_time(EVERY_S)
    assert await reported.pass_time(EVERY_S) == [first]
    (later,) = await reported.pass_time(RARELY_S)
    assert later.at > first.at
    reported.reporter.close()
    reported.gateway.close()


async def test_a_store_that_does_not_answer_is_told_of_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    reported = Reported(store)
    store.close()
    with caplog.at_level(logging.WARNING):
        reported.reporter.start()
        await eventually_async(lambda: caplog.text)
        reported.clock.advance(2 * EVERY_S)
        reported.reporter.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "controllers do not see" in caplog.text
    reported.gateway.close()

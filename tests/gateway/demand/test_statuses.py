"""What controllers say of pools, as a gateway takes it: by its own clock, and only while it is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from penstock.admission.admission import Admission
from penstock.gateway.demand.reporter import SILENT_AFTER_S
from penstock.gateway.demand.statuses import PoolStatuses
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.tenancy.fleet import PoolStatus
from tests.clocks import ManualClock


class Taken:
    def __init__(self) -> None:
        self.clock, self.admission = ManualClock(), Admission()
        self.managed: list[list[str]] = []
        queue = AdmissionQueue(self.admission, self.clock, lambda _: None)
        manage: Callable[[Iterable[str]], object] = lambda pools: self.managed.append(sorted(pools))  # noqa: E731
        self.statuses = PoolStatuses(self.admission, queue, self.clock.now, manage)

    def hear(self, *said: PoolStatus) -> None:
        self.statuses.apply({one.pool: one for one in said})

    def eta_s(self) -> float | None:
        return self.admission.eta_s("m", self.clock.now())


def said(number: float = 0.0, eta_s: float | None = 20.0, pool: str = "m") -> PoolStatus:
    """By a clock that is an hour ahead, as another machine's may be."""
    return PoolStatus(pool, time.time() + 3600.0 + number, eta_s=eta_s, start_s=7.0, hold_s=60.0)


def test_a_time_counts_from_when_it_was_said() -> None:
    taken, status = Taken(), said()
    taken.hear(status)
    assert taken.eta_s() == 20.0
    taken.clock.advance(4.0)
    taken.hear(status)  # the same again
    assert taken.eta_s() == 16.0
    taken.hear(said(1.0, eta_s=18.0))
    assert taken.eta_s() == 18.0
    taken.hear(said(2.0, eta_s=None))
    assert taken.eta_s() == 7.0


def test_a_controller_that_says_nothing_new_is_silent_though_its_row_is_there() -> None:
    taken, status = Taken(), said()
    taken.hear(status)
    taken.clock.advance(SILENT_AFTER_S)
    taken.hear(status)
    assert taken.admission.managed(taken.clock.now()) == {"m"}
    taken.clock.advance(0.1)
    assert (taken.eta_s(), taken.admission.managed(taken.clock.now())) == (None, set())
    taken.hear(said(1.0))
    assert taken.eta_s() == 20.0


def test_a_row_that_was_old_when_the_gateway_began_is_not_believed() -> None:
    taken = Taken()
    taken.hear(PoolStatus("m", time.time() - SILENT_AFTER_S - 1.0, eta_s=20.0, hold_s=60.0))
    assert (taken.eta_s(), taken.admission.can_hold(taken.clock.now())) == (None, False)


def test_pools_are_told_when_there_are_others() -> None:
    taken = Taken()
    taken.hear(said())
    taken.hear(said(1.0))
    taken.hear(said(2.0), said(2.0, pool="n"))
    taken.hear()
    assert taken.managed == [["m"], ["m", "n"], []]


def test_a_pool_that_serves_anothers_model_is_no_model() -> None:
    taken = Taken()
    beside = PoolStatus("m-prefill", time.time(), eta_s=1.0, hold_s=60.0, serves="m")
    taken.hear(said(), beside)
    assert taken.managed == [["m"]]
    assert taken.eta_s() == 20.0

"""Requests for a model that has no active replica, and whose controller says when it will have one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.admission.admission import Admission
from penstock.admission.decision import Admit, Decision, Queued, Shed, ShedReason
from penstock.admission.expected import Expected
from penstock.core.replica import ReplicaState
from penstock.router.request import EdgeRequest
from tests.snapshots import snapshot

ids = itertools.count()


def request(**facts: Any) -> EdgeRequest:
    return EdgeRequest(f"q{next(ids)}", "m", 100, 100, **facts)


def expecting(ready_at: float | None = 12.0, *, hold_s: float = 60.0, start_s: float = 0.0) -> Admission:
    admission = Admission()
    expect(admission, 0.0, ready_at, hold_s=hold_s, start_s=start_s)
    return admission


def expect(
    admission: Admission, now: float, ready_at: float | None, hold_s: float = 60.0, start_s: float = 0.0
) -> None:
    admission.expect({"m": Expected(hold_s, ready_at, start_s, until=now + 30.0)}, now)


def refusal(decision: Decision) -> tuple[ShedReason, float | None, bool]:
    assert isinstance(decision, Shed)
    return decision.reason, decision.retry_after_s, decision.is_expected


def test_a_request_is_held_until_a_replica_is_active() -> None:
    admission = expecting()
    held = admission.submit(request(), 2.0)
    assert isinstance(held, Queued)
    assert (held.is_held, held.predicted_wait_s) == (True, 10.0)
    admission.replica_changed(snapshot("a", models=("m",), state=ReplicaState.DRAINING, reports=False))
    assert admission.poll(11.0) == []
    admission.replica_changed(snapshot("a", models=("m",), reports=False))
    (admitted,) = admission.poll(12.0)
    assert isinstance(admitted, Admit)
    assert (admitted.replica_id, admitted.waited_s) == ("a", 10.0)


def test_one_that_would_wait_too_long_is_told_at_once_when_to_come_back() -> None:
    admission = expecting(ready_at=100.0)
    assert refusal(admission.submit(request(), 10.0)) == (ShedReason.NO_REPLICA, 90.0, True)
    assert admission.num_waiting("m") == 0


@pytest.mark.parametrize(("deadline", "is_held"), [(5.0, False), (12.0, True), (500.0, True)])
def test_a_deadline_of_its_own_counts_instead(deadline: float, is_held: bool) -> None:
    for ready_at in (12.0, 480.0 if deadline == 500.0 else 12.0):
        decision = expecting(ready_at).submit(request(deadline=deadline), 0.0)
        assert isinstance(decision, Queued) is is_held


def test_those_whose_replica_is_late_are_refused_when_that_is_known() -> None:
    admission = expecting(ready_at=12.0)
    early, patient = request(), request(deadline=300.0)
    for one in (early, patient):
        assert isinstance(admission.submit(one, 0.0), Queued)
    expect(admission, 5.0, ready_at=59.0)
    assert admission.poll(5.0) == []
    expect(admission, 6.0, ready_at=80.0)
    (refused,) = admission.poll(6.0)
    assert refused.request is early
    assert refusal(refused) == (ShedReason.NO_REPLICA, 74.0, True)
    assert admission.num_waiting("m") == 1


def test_where_none_is_on_its_way_the_time_of_a_start_counts_from_the_requests_arrival() -> None:
    admission = expecting(None, hold_s=20.0, start_s=15.0)
    held = request()
    assert isinstance(admission.submit(held, 0.0), Queued)
    expect(admission, 10.0, None, hold_s=20.0, start_s=15.0)
    assert admission.poll(10.0) == []
    assert admission.eta_s("m", 10.0, since=0.0) == 5.0
    (refused,) = admission.poll(20.0)
    assert refusal(refused) == (ShedReason.NO_REPLICA, 15.0, True)
    assert refusal(expecting(None, hold_s=10.0, start_s=15.0).submit(request(), 0.0))[1] == 15.0


def test_an_unknown_time_is_waited_for_as_long_as_requests_may() -> None:
    admission = expecting(None)
    assert isinstance(admission.submit(request(), 0.0), Queued)
    assert admission.eta_s("m", 1.0) is None
    assert admission.poll(59.0) == []
    (refused,) = admission.poll(60.0)
    assert refusal(refused)[2] is False


def test_a_controller_that_is_silent_or_holds_nothing_is_as_none() -> None:
    admission = expecting()
    assert refusal(admission.submit(request(), 31.0)) == (ShedReason.NO_REPLICA, 5.0, False)
    assert (admission.managed(30.0), admission.managed(31.0)) == ({"m"}, set())
    refusing = expecting(hold_s=0.0)
    assert refusal(refusing.submit(request(), 0.0)) == (ShedReason.NO_REPLICA, 12.0, True)  # but it knows when
    refusing.configure({}, {"m": 30.0})  # and the gateway's own settings hold
    assert isinstance(refusing.submit(request(), 0.0), Queued)


def test_a_replica_that_is_active_and_cannot_serve_it_is_not_waited_for() -> None:
    admission = expecting()
    admission.replica_changed(snapshot("a", models=("m",), reports=False))
    assert refusal(admission.submit(request(adapter="poet"), 0.0))[2] is False
    assert isinstance(admission.submit(request(), 0.0), Admit)


def test_a_full_queue_refuses_with_the_same_time() -> None:
    admission = expecting()
    decisions = [admission.submit(request(), 0.0) for _ in range(513)]
    assert all(isinstance(one, Queued) for one in decisions[:-1])
    assert refusal(decisions[-1]) == (ShedReason.NO_REPLICA, 12.0, True)

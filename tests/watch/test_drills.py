"""Drills on the virtual clock: each fault raises exactly the right alert, and only that."""

from __future__ import annotations

import pytest

from penstock.core.devices import DeviceReading
from penstock.watch.answers import SaidToken
from tests.watch.fleet import MODEL, Ended, Fleet

pytestmark = pytest.mark.slow


def test_fleet_that_is_well_raises_nothing() -> None:
    fleet = Fleet(rate=4.0)
    assert fleet.run(2 * 3600) == []
    assert fleet.watch.objectives(MODEL).status(fleet.now).state == "ok"


def test_replica_that_slows_to_half_speed_is_a_ticket_and_a_penalty() -> None:
    fleet = Fleet()
    fleet.run(600)
    fleet.speeds["r2"] = 25.0
    fleet.run(600)
    assert fleet.fired() == {("ReplicaSlow", "ticket")}
    assert [alert.replica for alert in fleet.changed] == ["r2"]
    assert 0.4 < fleet.watch.penalties().get((MODEL, "r2"), 1.0) < 0.6
    assert fleet.watch.penalties().get((MODEL, "r1"), 1.0) == 1.0
    fleet.speeds["r2"] = 50.0
    fleet.run(600)
    assert fleet.watch.penalties().get((MODEL, "r2"), 1.0) == 1.0
    assert fleet.changed[-1].state == "resolved"


def test_replica_that_answers_garbage_is_a_page_and_gets_next_to_nothing() -> None:
    fleet = Fleet()
    garbage = tuple(SaidToken("#", -9.0, {"#": -9.0}) for _ in range(5))
    for _ in range(3):
        fleet.probe()
        fleet.run(60)
    fleet.outputs["r1"] = 10.0  # it ends at once
    for _ in range(10):
        fleet.probe(r1=garbage)
        fleet.run(60)
    assert fleet.fired() == {("WrongAnswers", "page")}
    assert fleet.watch.penalties().get((MODEL, "r1"), 1.0) == 0.1


def test_burst_that_queues_for_minutes_is_a_ticket() -> None:
    fleet = Fleet()
    fleet.run(3600)
    fleet.rate, fleet.waiting, fleet.ttft_s = 24.0, 40, 0.6
    fleet.run(300)
    fleet.rate, fleet.waiting, fleet.ttft_s = 8.0, 0, 0.2
    fleet.run(600)
    assert fleet.fired() == {("QueueSustained", "ticket")}
    assert fleet.watch.board.firing == []


def test_burst_that_the_queue_takes_raises_nothing() -> None:
    fleet = Fleet()
    fleet.run(600)
    fleet.rate, fleet.waiting = 24.0, 40
    fleet.run(60)
    fleet.rate, fleet.waiting = 8.0, 0
    fleet.run(600)
    assert fleet.fired() == set()


def test_budget_that_burns_ten_times_too_fast_is_a_ticket() -> None:
    fleet = Fleet()
    fleet.run(600)
    fleet.fail = 0.0115
    fleet.run(3600)
    assert fleet.fired() == {("BudgetBurning", "ticket")}
    assert [alert.labels["objective"] for alert in fleet.changed] == ["errors"]


def test_budget_that_burns_twenty_times_too_fast_is_a_page() -> None:
    fleet = Fleet()
    fleet.run(60)
    fleet.fail = 0.02
    fleet.run(600)
    assert fleet.fired() == {("BudgetBurningFast", "page")}


def test_gpu_xid_is_a_page_and_over_after_a_while() -> None:
    fleet = Fleet()
    fleet.run(60)
    fleet.devices = [DeviceReading(device="GPU-1", replica="r3", model=MODEL, utilization=0.6, xids=(79,))]
    fleet.run(10)
    assert fleet.fired() == {("GpuXid", "page")}
    assert fleet.changed[0].labels == {"model": MODEL, "replica": "r3", "device": "GPU-1", "xid": "79"}
    fleet.run(600)
    assert [alert.state for alert in fleet.changed] == ["firing", "resolved"]


def test_engine_that_dies_is_a_page() -> None:
    fleet = Fleet()
    fleet.run(60)
    fleet.restarts["r0"] = 1
    fleet.run(60)
    assert fleet.fired() == {("ProcessCrash", "page")}


def test_request_that_replicas_are_lost_with_is_one_page_for_each_tenant() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.watch.quarantined("m", "attacker", f"0{number}", fleet.now)
    (alert,) = fleet.run(2)
    assert (alert.alert, alert.severity, alert.labels["tenant"]) == ("RequestQuarantined", "page", "attacker")
    assert "request 02 of tenant attacker" in alert.summary
    (over,) = fleet.run(400)
    assert not over.is_firing


def test_process_that_is_told_to_stop_and_started_anew_is_nothing() -> None:
    fleet = Fleet()
    fleet.run(60)
    fleet.draining = fleet.down = {"r0"}
    fleet.run(60)
    fleet.draining, fleet.down, fleet.boots["r0"] = set(), set(), "b1"
    fleet.run(60)
    assert fleet.fired() == set()


def test_process_that_the_kernel_killed_is_another_page() -> None:
    fleet = Fleet()
    fleet.run(60)
    fleet.boots["r0"], fleet.memory_kills["r0"] = "b1", 1
    fleet.run(60)
    assert fleet.fired() == {("OutOfMemoryKill", "page")}


def test_first_token_far_too_late_is_a_page() -> None:
    fleet = Fleet()
    fleet.run(3600)
    fleet.ttft_s = 1.5
    fleet.run(400)
    assert fleet.fired() == {("TtftFarOverTarget", "page")}


def test_model_without_replicas_is_a_page() -> None:
    fleet = Fleet(replicas=1)
    fleet.run(600)
    fleet.down, fleet.rate = {"r0"}, 0.0
    fleet.run(300)
    assert ("ModelDown", "page") in fleet.fired()
    assert fleet.fired() <= {("ModelDown", "page"), ("ProcessCrash", "page")}  # and why


def test_model_that_loads_for_an_hour_is_starting_and_costs_no_budget() -> None:
    fleet = Fleet(replicas=2, rate=1.0)
    fleet.starting = {"r0", "r1"}
    fleet.run(3600)
    assert fleet.fired() == set()
    status = fleet.watch.objectives(MODEL).status(fleet.now)
    assert [(one.events, one.budget_left) for one in status.objectives[:2]] == [(0, None), (0, None)]
    fleet.starting = {"r1"}
    fleet.run(60)
    assert fleet.fired() == set()
    assert fleet.watch.objectives(MODEL).status(fleet.now).objectives[0].events == 60
    fleet.starting, fleet.rate = {"r0", "r1"}, 0.0  # a model that was up is down, though it loads again
    fleet.run(60)
    assert fleet.fired() == {("ModelDown", "page")}


def test_model_whose_replicas_are_without_traffic_on_purpose_is_not_down_and_costs_no_budget() -> None:
    fleet = Fleet(replicas=2, rate=0.0)
    fleet.run(60)
    fleet.resting = {"r0", "r1"}
    fleet.run(600)
    assert fleet.fired() == set()
    assert fleet.watch.objectives(MODEL).status(fleet.now).objectives[0].events == 60
    fleet.resting, fleet.down = {"r0"}, {"r1"}  # the one that is to be used is gone
    fleet.run(60)
    assert ("ModelDown", "page") in fleet.fired()


def test_model_without_a_replica_that_a_controller_keeps_costs_no_budget() -> None:
    fleet = Fleet(replicas=1, rate=0.0)
    fleet.run(60)
    fleet.names, fleet.managed = [], {MODEL}
    fleet.run(60)
    assert fleet.watch.objectives(MODEL).status(fleet.now).objectives[0].events == 60
    fleet.managed = set()
    fleet.run(60)
    assert fleet.watch.objectives(MODEL).status(fleet.now).objectives[0].events == 120


def test_model_that_nobody_loads_is_a_page_after_minutes() -> None:
    fleet = Fleet(replicas=1, rate=0.0)
    fleet.down = {"r0"}
    fleet.run(149)
    assert fleet.fired() == set()
    fleet.run(2)
    assert fleet.fired() == {("ModelDown", "page")}


def test_few_slow_requests_are_no_page() -> None:
    fleet = Fleet(rate=0.0)
    fleet.run(60)
    for _ in range(99):
        fleet.watch.ended(Ended(ttft_s=4.0, total_s=30.0))
    fleet.run(900)
    assert fleet.fired() == set()
    fleet.watch.ended(Ended(ttft_s=4.0, total_s=30.0))
    fleet.run(10)
    assert {alert.labels["objective"] for alert in fleet.changed} == {"ttft", "tpot", "latency"}
    assert fleet.fired() == {("BudgetBurningFast", "page")}


def test_few_failures_of_few_requests_are_a_page() -> None:
    fleet = Fleet(rate=0.0)
    fleet.run(60)
    for _ in range(10):
        fleet.watch.ended(Ended(ending="failed"))
    fleet.run(10)
    assert fleet.fired() == {("BudgetBurningFast", "page")}


def test_objective_that_is_nearly_used_up_is_a_warning() -> None:
    fleet = Fleet(ttft_s=0.33)
    fleet.run(1200)
    assert fleet.fired() == {("ObjectiveAtRisk", "ticket")}
    assert fleet.changed[0].labels["level"] == "warning"


def test_idle_device_is_a_ticket_after_an_hour() -> None:
    fleet = Fleet(rate=1.0)
    fleet.devices = [DeviceReading(device="GPU-1", utilization=0.1)]
    fleet.run(3500)
    assert fleet.fired() == set()
    fleet.run(200)
    assert fleet.fired() == {("GpuUnderused", "ticket")}

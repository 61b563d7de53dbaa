"""Overload and spikes against step-wise replicas on a manual clock: deterministic, in about a second each."""

import pytest

from penstock.admission.admission import Admission
from penstock.core.request import Priority
from tests.admission.simulation import Simulation, percentile

pytestmark = pytest.mark.slow

CAPACITY = 26.0  # requests per second of the two simulated replicas, measured by offering more


@pytest.mark.parametrize(
    ("priority", "tenants"), [(Priority.HIGH, 1), (Priority.NORMAL, 1), (Priority.NORMAL, 8), (Priority.LOW, 1)]
)
def test_retry_after_holds_when_twice_the_capacity_is_asked_for(priority: Priority, tenants: int) -> None:
    sim = Simulation(Admission())
    sim.comes_back = True
    for tenant in range(tenants):
        sim.arrivals(2 * CAPACITY / tenants, until=90, tenant=f"t{tenant}", priority=priority)
    sim.run(until=260)
    jobs = {job.request.id: job for job, _ in sim.refused}.values()
    returns = sum(job.tries - 1 for job in jobs)
    refused_again = sum(job.outcomes.count("Shed") - 1 for job in jobs)
    assert returns > 1000
    assert refused_again <= 0.1 * returns
    assert len(sim.finished) > 0.9 * 90 * 2 * CAPACITY  # nobody is turned away for good


def others_p95(*, spike: bool, load: float, seed: int) -> float:
    sim = Simulation(Admission(), seed=seed)
    rate = load * CAPACITY / 10
    for tenant in range(1, 10):
        sim.arrivals(rate, until=90, tenant=f"t{tenant}")
    sim.arrivals(10 * rate if spike else rate, until=90, tenant="t0")
    sim.run(until=90)
    return percentile([job.ttft or 0.0 for job in sim.finished if job.request.tenant != "t0" and job.asked > 15], 0.95)


@pytest.mark.parametrize("load", [0.5, 0.65])
def test_a_tenants_tenfold_spike_leaves_the_others_ttft_as_it_was(load: float) -> None:
    assert others_p95(spike=True, load=load, seed=1) <= 1.2 * others_p95(spike=False, load=load, seed=1)


def test_batch_work_leaves_interactive_ttft_alone_and_is_not_starved() -> None:
    sim = Simulation(Admission())
    sim.arrivals(0.6 * CAPACITY, until=120, priority=Priority.HIGH)
    sim.arrivals(1.0 * CAPACITY, until=120, priority=Priority.LOW)
    sim.run(until=120)
    by_class = {p: [j.ttft or 0.0 for j in sim.finished if j.request.priority is p] for p in Priority}
    assert percentile(by_class[Priority.HIGH], 0.95) < 0.1
    assert len(by_class[Priority.LOW]) > 120 * 0.1 * CAPACITY


def test_one_tenant_alone_gets_the_whole_machine() -> None:
    sim = Simulation(Admission())
    sim.arrivals(1.5 * CAPACITY, until=60, tenant="only")
    sim.run(until=60)
    assert len(sim.finished) > 0.95 * 60 * CAPACITY


def test_a_replica_is_sent_no_more_than_about_a_step_of_prefill_ahead() -> None:
    sim = Simulation(Admission())
    sim.arrivals(2 * CAPACITY, until=20, prompt=(1000, 1500))
    worst = 0
    while sim.now < 20:
        sim.run(until=sim.now + 0.05)
        worst = max(worst, *(sum(job.left for job in replica.jobs) for replica in sim.replicas.values()))
    assert 0 < worst < 2048 + 1500

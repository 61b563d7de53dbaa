"""Misfortunes at scale: what is promised when replicas die, hang, fill up or slow down, and when a tenant runs wild."""

from dataclasses import replace

import pytest

from penstock.core.request import Priority
from penstock.core.slo import Slo
from penstock.router.router import Choice
from penstock.sim.cost import StepCost
from penstock.sim.flight import Ask, Flight
from penstock.sim.profile import Profile
from penstock.sim.simulation import Simulation

pytestmark = pytest.mark.slow

COST = StepCost(step_s=2e-3, weights_s=4e-3, token_s=25e-6, pair_s=1e-9, context_s=30e-9)
PROFILE = Profile(
    "drilled", COST, kv_tokens=100_000, max_sequences=32, chunk_tokens=2048, slo=Slo(ttft_s=1.0, tpot_s=0.05)
)
FLEET = 20


class Seen:
    def __init__(self) -> None:
        self.flights: list[Flight] = []

    def __call__(self, flight: Flight) -> None:
        self.flights.append(flight)

    def of(self, tenant: str) -> list[Flight]:
        return [flight for flight in self.flights if flight.ask.tenant == tenant]


def steady(seconds: float, per_s: float, prompt: int = 1000, output: int = 60, tenant: str = "") -> list[Ask]:
    return [Ask(i / per_s, prompt, output, (), None, tenant) for i in range(int(seconds * per_s))]


def slowest_ttft_s(flights: list[Flight]) -> float:
    return max(flight.first_s - flight.ask.at_s for flight in flights if flight.first_s is not None)


def together(*asks: list[Ask]) -> list[Ask]:
    return sorted((ask for some in asks for ask in some), key=lambda ask: ask.at_s)


def test_replicas_killed_cost_no_request() -> None:
    """A tenth of the fleet dies at once; its streams go on elsewhere and its caches come back cold."""
    seen = Seen()
    sim = Simulation(PROFILE, FLEET, ended=seen)
    for number in range(FLEET // 10):
        sim.events.at(5.0, sim.kill, f"r{number}")
        sim.events.at(8.0, sim.revive, f"r{number}")
    result = sim.run(steady(15.0, 60.0, prompt=2000, output=120))
    moved = [flight for flight in seen.flights if flight.moves]
    assert result.answered == result.requests
    assert len(moved) > 2
    assert slowest_ttft_s(moved) < 2.0
    late = [flight.replica for flight in seen.flights if flight.ask.at_s > 12.0]
    assert {f"r{number}" for number in range(FLEET // 10)} <= set(late)  # they take part again


def test_streams_that_lose_every_replica_end_as_lost() -> None:
    """The second replica dies before the first one's streams have arrived there."""
    seen = Seen()
    sim = Simulation(PROFILE, 2, ended=seen)
    for number in range(2):
        sim.events.at(2.0, sim.kill, f"r{number}")
        sim.events.at(4.0, sim.revive, f"r{number}")
    sim.run(steady(6.0, 20.0))
    assert len(seen.flights) == 120
    lost = [flight for flight in seen.flights if flight.shed == "lost"]
    assert lost
    assert all(flight.ask.at_s <= 2.0 == flight.ended_s for flight in lost)


def test_a_replica_that_hangs_gets_no_more_work_and_loses_what_it_has() -> None:
    """Its server still answers: the steps that stand still give it away, after ten seconds."""
    seen = Seen()
    sim = Simulation(PROFILE, FLEET, ended=seen)
    sim.events.at(5.0, sim.replicas["r7"].hang)
    result = sim.run(steady(18.0, 40.0))
    moved = [flight for flight in seen.flights if flight.moves]
    assert result.answered == result.requests
    assert 0 < len(moved) < 2 * PROFILE.max_sequences
    assert all(flight.ended_s is not None and flight.ended_s < 5.0 + 14.0 for flight in moved)
    came_after = [flight for flight in seen.flights if flight.ask.at_s > 8.0]
    assert not [flight for flight in came_after if flight.moves]  # suspect after a quarter of the time


def test_a_full_kv_cache_preempts_few_and_loses_none() -> None:
    """Answers far longer than anybody expects: what was let in comes to more than the caches hold."""
    small = replace(PROFILE, kv_tokens=10_240)
    asked = [Ask(i * 0.02, 500, 2000) for i in range(40)]
    result = Simulation(small, 2).run(asked)
    assert result.answered + sum(result.shed.values()) == 40
    assert set(result.shed) <= {"kv_tight", "queue_full", "too_slow", "deadline"}
    assert result.answered > 20
    assert result.preemptions < result.answered


def test_long_contexts_do_not_starve_the_short() -> None:
    """Out of memory under long context: prompts of a third of a cache each, beside many short ones."""
    seen = Seen()
    long = [Ask(i * 0.5, 30_000, 200, (), None, "long") for i in range(20)]
    result = Simulation(PROFILE, 4, ended=seen).run(together(long, steady(10.0, 15.0, tenant="short")))
    short = seen.of("short")
    assert all(not flight.shed for flight in short)
    assert slowest_ttft_s(short) < 4.0
    assert result.preemptions < 20
    assert len([flight for flight in seen.of("long") if not flight.shed]) > 10


def test_what_fits_no_replica_is_refused_at_once() -> None:
    result = Simulation(PROFILE, 4).run([Ask(0.0, 150_000, 10), Ask(0.1, 100, 10)])
    assert result.shed == {"too_large": 1}
    assert result.answered == 1


def test_a_tenants_spike_is_its_own_trouble() -> None:
    """Ten times what the fleet can do, from one tenant; the other hardly notices."""
    calm, spiked = Seen(), Seen()
    quiet = steady(8.0, 15.0, tenant="calm")
    Simulation(PROFILE, 3, ended=calm).run(quiet)
    spike = [Ask(2.0 + i * 0.0005, 1000, 60, (), None, "wild") for i in range(2000)]
    Simulation(PROFILE, 3, ended=spiked).run(together(quiet, spike))
    assert all(not flight.shed for flight in spiked.of("calm"))
    assert slowest_ttft_s(spiked.of("calm")) < slowest_ttft_s(calm.of("calm")) + 1.0
    assert len([flight for flight in spiked.of("wild") if flight.shed]) > 500


def test_a_high_class_is_served_through_a_flood_of_the_low() -> None:
    seen = Seen()
    low = [ask._replace(priority=Priority.LOW) for ask in steady(5.0, 250.0, tenant="batch")]
    high = [ask._replace(priority=Priority.HIGH) for ask in steady(5.0, 10.0, tenant="person")]
    Simulation(PROFILE, 2, ended=seen).run(together(low, high))
    assert all(not flight.shed for flight in seen.of("person"))
    assert slowest_ttft_s(seen.of("person")) < 1.5


def test_a_slow_replica_is_left_to_itself() -> None:
    """A device that throttles, or a provider, ten times as slow: it gets far less, and nobody waits for it long."""
    seen = Seen()
    sim = Simulation(PROFILE, 6, ended=seen)

    def throttle() -> None:
        sim.replicas["r0"].slowdown = 10.0

    sim.events.at(3.0, throttle)
    result = sim.run(steady(14.0, 40.0))
    late = [flight for flight in seen.flights if flight.ask.at_s > 8.0]
    share = sum(flight.replica == "r0" for flight in late) / len(late)
    assert result.answered == result.requests
    assert share < 0.5 / 6


def test_every_choice_of_a_replica_is_told_with_the_next_ones_of_those_it_loses() -> None:
    ways: dict[int, list[str]] = {}

    def chosen(flight: Flight, choice: Choice, now: float) -> None:
        assert now >= flight.ask.at_s
        assert choice.replica is not None
        ways.setdefault(flight.number, []).append(choice.replica.id)

    seen = Seen()
    sim = Simulation(PROFILE, 4, chosen=chosen, ended=seen)
    sim.events.at(1.0, sim.kill, "r1")
    sim.run(steady(2.0, 40.0))
    moved = [flight for flight in seen.flights if flight.moves]
    assert moved
    assert all(ways[flight.number][0] == "r1" for flight in moved)
    assert all(len(ways[flight.number]) == 1 + flight.moves for flight in seen.flights)
    assert all(ways[flight.number][-1] == flight.replica for flight in seen.flights)

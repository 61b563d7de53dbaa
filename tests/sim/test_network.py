"""Prefill and decode apart, simulated: nothing is lost or held, and times are those of the network and the steps."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.errors import ConfigError
from penstock.core.settings import Role
from penstock.core.slo import Slo
from penstock.engine.step_log import StepShape
from penstock.router.legs import Split
from penstock.sim.flight import Ask, Flight
from penstock.sim.network import KvLink
from penstock.sim.simulation import Simulation
from tests.sim.test_simulation import COST, PROFILE, asks, crowd

pytestmark = pytest.mark.slow

APART: tuple[Role, ...] = ("prefill", "decode")
LINK = KvLink(12.5)


@settings(max_examples=25, deadline=None)
@given(
    asks(),
    st.sampled_from([APART, ("prefill", "decode", "decode"), ("both", "both"), ("prefill", "both", "decode")]),
    st.sampled_from(["auto", "always", "never"]),
    st.floats(0.05, 400.0),
    st.none() | st.tuples(st.floats(0.1, 3.0), st.sampled_from(["r0", "r1"])),
)
def test_every_request_ends_once_and_no_block_is_left_with_roles(
    asked: list[Ask], roles: tuple[Role, ...], split: Split, gb_s: float, killed: tuple[float, str] | None
) -> None:
    ended: Counter[int] = Counter()

    def note(flight: Flight) -> None:
        ended[flight.number] += 1

    sim = Simulation(PROFILE, roles, kv_link=KvLink(gb_s), split=split, ended=note)
    if killed is not None:
        sim.events.at(killed[0], sim.kill, killed[1])
        sim.events.at(killed[0] + 1.0, sim.revive, killed[1])
    result = sim.run(asked)
    assert ended == Counter(range(len(asked)))
    assert result.requests == len(asked) == result.answered + sum(result.shed.values())
    sim.run_until(sim.events.now + 60.0)  # leases of what nobody dropped end too
    for replica in sim.replicas.values():
        assert replica.transfer is not None
        assert not replica.transfer.has_work
        assert replica.cache.pool.num_free == replica.cache.pool.num_blocks
        assert not replica.scheduler.has_work


def test_what_is_pulled_was_lent_and_is_computed_once() -> None:
    sim = Simulation(PROFILE, APART, kv_link=LINK, split="always")
    asked = [Ask(i * 0.2, 2000 + 37 * i, 20) for i in range(30)]
    result = sim.run(asked)
    prefill, decode = (replica.transfer.totals for replica in sim.replicas.values() if replica.transfer is not None)
    whole_blocks = sum((ask.prompt_tokens - 1) // PROFILE.block_tokens * PROFILE.block_tokens for ask in asked)
    assert (decode.pulls, decode.failed_pulls, decode.pulled_tokens) == (30, 0, whole_blocks)
    assert prefill.lent_tokens == decode.pulled_tokens
    assert result.answered == 30
    assert result.hit_rate == 0.0  # what was computed for a request elsewhere was not found
    counters = sim.replicas["r1"].scheduler.counters
    assert counters.generated_tokens == sum(ask.output_tokens for ask in asked)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.integers(2, 255), st.floats(0.05, 400.0), st.floats(0.0, 0.01))
def test_a_first_token_takes_the_time_of_its_messages_its_steps_and_its_blocks(
    blocks: int, tail: int, gb_s: float, latency_s: float
) -> None:
    """One request that fits a chunk: it is asked for, computed, pulled as a whole, and its tail is computed."""
    link, size = KvLink(gb_s, latency_s), PROFILE.block_tokens
    flights: list[Flight] = []
    sim = Simulation(PROFILE, APART, kv_link=link, split="always", ended=flights.append)
    sim.run([Ask(0.5, blocks * size + tail, 1)])
    pulled = blocks * size
    prefill_s = COST.seconds(StepShape(pulled, pulled * (pulled + 1) // 2))
    pairs = sum(range(pulled + 1, pulled + tail + 1))
    rest_s = COST.seconds(StepShape(tail, pairs))
    network_s = 2 * latency_s + link.seconds(blocks * PROFILE.block_bytes)
    expected_s = PROFILE.request_s + network_s + prefill_s + rest_s
    assert flights[0].first_s == pytest.approx(0.5 + expected_s, rel=1e-9)


def test_without_a_transfer_or_by_never_nothing_is_pulled() -> None:
    plain = Simulation(PROFILE, 2).run(crowd(80))
    never = Simulation(PROFILE, 2, kv_link=LINK, split="never").run(crowd(80))
    assert (plain.ttft_s, plain.e2e_s, plain.loads) == (never.ttft_s, never.e2e_s, never.loads)


def test_prompts_that_are_pulled_are_in_no_queue_of_the_replica_that_answers() -> None:
    sim = Simulation(PROFILE, APART, kv_link=LINK, split="always")
    for i in range(4):
        sim.ask(Ask(0.001 * i, 8000, 5))
    sim.run_until(0.1)
    prefill, decode = (replica.measured().load.queued_tokens for replica in sim.replicas.values())
    assert decode <= 4
    assert prefill > 2000  # admission keeps the others back


def test_a_split_keeps_answers_from_waiting_for_prompts() -> None:
    asked = [Ask(0.1 * i, 100, 200) for i in range(20)] + [Ask(1.0 + 0.4 * i, 8000, 2) for i in range(10)]
    asked.sort(key=lambda ask: ask.at_s)
    together = Simulation(PROFILE, 2, kv_link=LINK, split="never").run(asked)
    apart = Simulation(PROFILE, APART, kv_link=LINK, split="always").run(asked)
    assert together.tpot_s.p99 is not None
    assert apart.tpot_s.p99 is not None
    assert apart.tpot_s.p99 < together.tpot_s.p99


def test_by_gain_prompts_are_computed_apart_the_more_the_tighter_the_objective_of_tokens_is() -> None:
    chats = [Ask(i * 0.05, 300, 200) for i in range(80)]
    asked = sorted([*chats, *(Ask(1.0 + i * 0.1, 4000, 2) for i in range(20))])
    apart = []
    for tpot_s in (1.0, 0.01):
        sim = Simulation(PROFILE, APART, kv_link=LINK, slo=Slo(ttft_s=2.0, tpot_s=tpot_s))
        sim.run(asked)
        assert sim.replicas["r1"].transfer is not None
        apart.append(sim.replicas["r1"].transfer.totals.pulls)
    assert apart[0] < apart[1]


def test_by_gain_replicas_with_both_roles_compute_no_prompts_for_each_other() -> None:
    sim = Simulation(PROFILE, 2, kv_link=LINK, slo=Slo(ttft_s=2.0, tpot_s=0.01))
    sim.run([Ask(i * 0.05, 2000, 50) for i in range(40)])
    assert all(one.transfer is not None and one.transfer.totals.pulls == 0 for one in sim.replicas.values())


@pytest.mark.parametrize(("link", "param"), [((0.0, 0.0), "kv_gb_s"), ((1.0, -1.0), "latency_s")])
def test_a_link_that_cannot_be_is_refused(link: tuple[float, float], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KvLink(*link)
    assert refused.value.param == param

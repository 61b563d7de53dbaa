from __future__ import annotations

import math

import msgspec

from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Demand
from penstock.fleet.policy.profile import CapacityProfile
from penstock.fleet.policy.signals import Signals, corrected_slowdown, read_signals
from tests.fleet.policy.fake_pool import COSTS, MIX, MONDAY, RATE, SLO, demand

PROFILE = CapacityProfile(COSTS)


def remembered(rate: float, dispersion: float) -> PolicyMemory:
    return PolicyMemory(
        at=MONDAY,
        rate=rate,
        dispersion=dispersion,
        prompt_tokens=MIX.prompt_tokens,
        output_tokens=MIX.output_tokens,
    )


def signals(seen: Demand, memory: PolicyMemory, active: int = 4) -> Signals:
    return read_signals(seen, memory, MONDAY + 1, active, PROFILE, SLO)


def test_chance_is_no_rise_and_a_jump_is_one_at_once() -> None:
    memory = remembered(100.0, 15.0)
    assert signals(demand(112.0), memory).rate < 101
    assert signals(demand(200.0), memory).rate > 180


def test_a_noisy_pool_has_more_to_spare() -> None:
    calm, noisy = (signals(demand(100.0), remembered(100.0, dispersion)).spare for dispersion in (1.0, 10.0))
    assert noisy > 2 * calm > 0


def test_a_queue_breaks_the_slo_when_it_takes_too_long_to_work_off() -> None:
    memory = remembered(2 * RATE, 1.0)
    short, long = (demand(2 * RATE, waiting=n, waiting_tokens=n * 500) for n in (int(RATE), int(8 * RATE)))
    assert not signals(short, memory).breaks_slo
    assert signals(long, memory).breaks_slo
    assert signals(demand(0.0, held=1), memory, active=0).queue_s == math.inf


def test_waiting_tokens_are_no_number_of_requests_before_it_is_known_how_long_one_is() -> None:
    first = Demand(waiting=1, held=1, waiting_tokens=646)
    assert signals(first, PolicyMemory(), active=0).backlog == 1


def test_one_odd_report_changes_little_and_many_change_no_more_than_the_bound() -> None:
    memory = remembered(3 * RATE, 1.0)
    odd = demand(3 * RATE, tpot_p95_s=100.0, ttft_p95_s=1000.0)
    once = corrected_slowdown(odd, signals(odd, memory), memory, MONDAY, 4, PROFILE, SLO)
    assert 1 < once < 1.02
    for _ in range(1000):
        memory = msgspec.structs.replace(
            memory, slowdown=corrected_slowdown(odd, signals(odd, memory), memory, MONDAY, 4, PROFILE, SLO)
        )
    assert 1.05 < memory.slowdown <= 1.5


def test_tokens_of_replicas_with_a_queue_say_how_fast_they_are() -> None:
    memory = msgspec.structs.replace(remembered(4 * RATE, 1.0), queued_since=MONDAY - 70)
    for speed, is_slower in ((0.7, True), (1.3, False)):
        tokens = speed * 4 * PROFILE.saturation(MIX, SLO) * (MIX.prompt_tokens + MIX.output_tokens)
        seen = demand(4 * RATE, waiting=10_000, waiting_tokens=5_000_000, tokens_per_s=tokens)
        assert (corrected_slowdown(seen, signals(seen, memory), memory, MONDAY, 4, PROFILE, SLO) > 1) is is_slower


def test_times_and_tokens_of_a_queue_that_has_just_come_or_gone_correct_nothing() -> None:
    memory = remembered(3 * RATE, 1.0)
    late = demand(3 * RATE, ttft_p95_s=8.0, tokens_per_s=RATE)
    queue = msgspec.structs.replace(late, waiting=10_000, waiting_tokens=5_000_000)
    for seen, more in ((late, {"queued_at": MONDAY - 30}), (queue, {"queued_since": MONDAY - 5, "queued_at": MONDAY})):
        then = msgspec.structs.replace(memory, **more)
        assert corrected_slowdown(seen, signals(seen, then), then, MONDAY, 4, PROFILE, SLO) == 1.0


def test_an_idle_pool_corrects_nothing() -> None:
    memory = remembered(0.1 * RATE, 1.0)
    seen = demand(0.1 * RATE, tpot_p95_s=100.0)
    assert corrected_slowdown(seen, signals(seen, memory), memory, MONDAY, 4, PROFILE, SLO) == 1.0

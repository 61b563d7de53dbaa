"""A simulated replica does what the real engine loop does, to the last bit, however many steps it takes at once."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.request import Priority, TokenEvent
from penstock.core.slo import Slo
from penstock.sim.cost import StepCost
from penstock.sim.events import Events
from penstock.sim.profile import Profile
from penstock.sim.replica import SimReplica
from penstock.sim.sim_prompts import TokenRun, as_request
from tests.examples import examples
from tests.sim.real_loop import Asked, Seen, run_engine

pytestmark = pytest.mark.slow

COST = StepCost(step_s=1e-3, weights_s=2e-3, token_s=20e-6, pair_s=1e-9, context_s=1e-6, sequence_s=5e-6)


def profile(
    overlaps: bool, kv_tokens: int = 8192, max_sequences: int = 8, host_kv_tokens: int = 0, stages: int = 1
) -> Profile:
    return Profile(
        "small",
        COST,
        kv_tokens=kv_tokens,
        max_sequences=max_sequences,
        chunk_tokens=512,
        block_tokens=16,
        max_context_tokens=4096,
        overlaps=overlaps,
        slo=Slo(ttft_s=0.05, tpot_s=0.01),
        host_kv_tokens=host_kv_tokens,
        devices=2 * stages,
        stages=stages,
    )


class Ear:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._first: dict[str, tuple[float, int]] = {}
        self.seen: dict[str, Seen] = {}

    def token(self, replica: SimReplica, event: TokenEvent) -> None:
        if event.timings is not None:
            self._first[event.request_id] = (self._events.now, event.cached_tokens or 0)
        if event.finish is not None:
            first_s, cached = self._first[event.request_id]
            assert event.request_id not in self.seen
            self.seen[event.request_id] = Seen(first_s, self._events.now, cached)


def simulate(profile: Profile, asked: list[Asked], *, takes_many: bool) -> tuple[dict[str, Seen], SimReplica, int]:
    events = Events()
    ear = Ear(events)
    replica = SimReplica("r", profile, events, ear, takes_many=takes_many)
    for number, one in enumerate(asked):
        run = TokenRun(number, one.prompt_tokens, one.names, profile.block_tokens)
        request = as_request(str(number), run, one.output_tokens, one.priority, tenant=one.tenant)
        events.at(one.at_s, replica.submit, request)
    count = 0
    while events.step():
        count += 1
    return ear.seen, replica, count


def prompts() -> st.SearchStrategy[Asked]:
    """Few names, so that beginnings are shared; and a tail of one's own."""
    chains = st.sampled_from([(), (1,), (1, 2), (1, 2, 3), (4,), (4, 5)])
    return st.builds(
        lambda at, names, tail, *rest: Asked(at, 512 * len(names) + tail, rest[0], names, *rest[1:]),
        st.floats(0.0, 1.0),
        chains,
        st.integers(1, 500),
        st.integers(1, 80),
        st.sampled_from(Priority),
        st.sampled_from(["", "", "b", "c"]),
    )


def test_who_comes_as_its_tenants_last_request_ends_finds_it_still_there() -> None:
    """The loop reads its mail before it looks at the step that is done."""
    high, low = Priority.HIGH, Priority.LOW
    asked = [
        Asked(0.0, 1, 1, (), high),
        Asked(0.25, 577, 20, (1,), low, "c"),
        Asked(0.34375, 769, 5, (4,), high),
        Asked(0.3828125, 1, 1, (), low, "b"),
        Asked(0.03125, 914, 38, (1,), high),
        Asked(0.046875, 172, 62, (), high),
        Asked(0.015625, 1537, 1, (1, 2, 3), low),
        Asked(0.00390625, 1189, 63, (1, 2), high, "b"),
    ]
    small = profile(False, kv_tokens=2560, max_sequences=3)
    real, _ = run_engine(small, asked)
    assert simulate(small, asked, takes_many=False)[0] == simulate(small, asked, takes_many=True)[0] == real


@settings(max_examples=examples(25))
@given(
    st.lists(prompts(), min_size=1, max_size=14, unique_by=lambda one: one.at_s),
    st.booleans(),
    st.integers(2, 8),
    st.sampled_from([0, 0, 1024, 16_384]),
)
def test_it_agrees_with_the_real_loop(asked: list[Asked], overlaps: bool, max_sequences: int, host: int) -> None:
    """Also where the cache is so small that sequences are preempted, and where there is more of it on the host."""
    small = profile(overlaps, kv_tokens=2560, max_sequences=max_sequences, host_kv_tokens=host)
    real, scheduler = run_engine(small, asked)
    for takes_many in (False, True):
        seen, replica, _ = simulate(small, asked, takes_many=takes_many)
        assert seen == real
        assert replica.scheduler.counters == scheduler.counters
        assert replica.scheduler.budget.tokens == scheduler.budget.tokens
        assert replica.cache.pool.counters == scheduler.cache.pool.counters
        assert replica.cache.loaded_tokens == scheduler.cache.loaded_tokens
        assert replica.cache.pool.num_free == replica.cache.pool.num_blocks
        assert replica.num_open == 0


@settings(max_examples=examples(8))
@given(
    st.lists(prompts(), min_size=1, max_size=14, unique_by=lambda one: one.at_s),
    st.integers(2, 4),
    st.integers(2, 8),
    st.sampled_from([0, 1024]),
)
def test_a_pipeline_agrees_with_the_real_loop(asked: list[Asked], stages: int, max_sequences: int, host: int) -> None:
    small = profile(True, kv_tokens=2560, max_sequences=max_sequences, host_kv_tokens=host, stages=stages)
    real, scheduler = run_engine(small, asked)
    seen, replica, _ = simulate(small, asked, takes_many=True)
    assert seen == real
    assert replica.scheduler.counters == scheduler.counters
    assert replica.cache.pool.counters == scheduler.cache.pool.counters
    assert replica.num_open == 0


def test_a_pipeline_serves_as_many_batches_as_it_has_stages_and_no_answer_sooner() -> None:
    """A step of two sequences takes as long as one of eight, but for its context, and four are under way."""
    asked = [Asked(0.0, 1, 200) for _ in range(8)]
    alone = [Asked(0.0, 1, 200)]
    ends = {
        (stages, len(batch)): max(
            one.end_s for one in simulate(profile(True, stages=stages), batch, takes_many=True)[0].values()
        )
        for stages in (1, 4)
        for batch in (asked, alone)
    }
    assert ends[4, 1] == pytest.approx(ends[1, 1], rel=0.01)
    assert 0.8 * ends[1, 8] < ends[4, 8] < ends[1, 8]
    _, replica, _ = simulate(profile(True, stages=4), asked, takes_many=True)
    assert replica.work_s < replica.busy_s


@pytest.mark.parametrize("overlaps", [False, True])
def test_many_steps_at_once_are_few_events_and_the_same_end(overlaps: bool) -> None:
    asked = [Asked(0.01 * i, 300, 400) for i in range(6)]
    one_by_one, slow, many_events = simulate(profile(overlaps), asked, takes_many=False)
    at_once, fast, few_events = simulate(profile(overlaps), asked, takes_many=True)
    assert at_once == one_by_one
    assert fast.steps == slow.steps
    assert fast.busy_s == pytest.approx(slow.busy_s)
    assert fast.work_s == pytest.approx(slow.work_s)
    assert fast.speed.decode_step_s == pytest.approx(slow.speed.decode_step_s)
    assert few_events < many_events / 5


def test_a_request_that_comes_amid_many_steps_waits_for_one_of_them_only() -> None:
    asked = [Asked(0.0, 100, 1000), Asked(0.5, 100, 1)]
    seen, _, _ = simulate(profile(False), asked, takes_many=True)
    assert seen["1"].first_s - 0.5 < 0.02
    assert seen["0"].end_s > 3.0


def test_what_it_reports_amid_many_steps_moves_on() -> None:
    events = Events()
    replica = SimReplica("r", profile(True), events, Ear(events))
    events.at(0.0, replica.submit, as_request("0", TokenRun(0, 100, (), 16), 1000, Priority.NORMAL))
    events.run_until(0.5)
    before = replica.measured().load
    events.run_until(1.0)
    after = replica.measured().load
    assert before.num_running == after.num_running == 1
    assert before.steps < after.steps
    assert before.kv_active_tokens < after.kv_active_tokens


def test_one_that_hangs_stands_still_and_one_that_restarts_is_empty() -> None:
    events = Events()
    replica = SimReplica("r", profile(True), events, Ear(events))
    events.at(0.0, replica.submit, as_request("0", TokenRun(0, 100, (), 16), 1000, Priority.NORMAL))
    events.run_until(0.5)
    replica.hang()
    steps = replica.measured().load.steps
    events.run_until(5.0)
    assert replica.measured().load.steps == steps
    assert replica.num_generated("0") > 50
    replica.restart()
    assert replica.num_open == 0
    assert replica.cache.pool.num_free == replica.cache.pool.num_blocks


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_it_has_not_computed_yet_it_reports_as_queued(overlaps: bool) -> None:
    """Also what is in its mail, and what the step that is under way will compute."""
    events = Events()
    replica = SimReplica("r", profile(overlaps), events, Ear(events))
    for number in range(2):
        events.at(
            0.001 * number, replica.submit, as_request(str(number), TokenRun(number, 2000, (), 16), 5, Priority.LOW)
        )
    events.run_until(0.002)
    assert replica.measured().load.queued_tokens == 4000
    events.run_until(0.03)
    assert 2000 < replica.measured().load.queued_tokens < 4000
    events.run_until(5.0)
    assert replica.measured().load.queued_tokens == 0

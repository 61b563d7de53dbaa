"""Steps for a pipeline: as many are in flight as it has stages, and no sequence is in two of them."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import Request
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12)


def scheduler_of(num_batches: int, num_blocks: int) -> Scheduler:
    budget = StepBudget(16, target_s=None, floor=4)
    return Scheduler(KVCache(num_blocks, 4), budget, max_num_seqs=8, num_batches=num_batches)


def answers(requests: list[Request], num_batches: int, num_blocks: int) -> tuple[dict[str, list[int]], int]:
    """What each request is answered, and the most steps that were in flight at once."""
    scheduler, runner = scheduler_of(num_batches, num_blocks), FakeRunner(num_blocks, 4, overlaps=False)
    for request in requests:
        scheduler.submit(request, 0.0)
    in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    most = 0
    while scheduler.has_work:
        plan = scheduler.plan(0.0) if len(in_flight) < num_batches else None
        if plan is not None:
            sampling = {s.request_id for s in plan.slices}
            for other, _ in in_flight:
                assert not sampling & {s.request_id for s in other.slices if s.sample is not None}, "it awaits a token"
            assert not any(planned.awaits_token for planned in plan.slices)
            in_flight.append((plan, runner.submit(plan)))
            most = max(most, len(in_flight))
            continue
        plan, handle = in_flight.popleft()
        for event in scheduler.commit(plan, handle.result(), 0.0):
            found[event.request_id] += event.token_ids
    return found, most


@given(LENGTHS, st.integers(2, 4), st.sampled_from([9, 64]))
def test_answers_are_those_of_one_stage(lengths: list[tuple[int, int]], num_batches: int, num_blocks: int) -> None:
    """With few blocks sequences are preempted on the way."""
    requests = [Request(f"r{i}", list(range(1, size + 1)), most) for i, (size, most) in enumerate(lengths)]
    assert answers(requests, num_batches, num_blocks)[0] == answers(requests, 1, num_blocks)[0]


def test_those_who_decode_are_shared_out_so_that_every_stage_has_work() -> None:
    requests = [Request(f"r{i}", [1, 2, i], max_tokens=10) for i in range(8)]
    scheduler, runner = scheduler_of(4, 64), FakeRunner(64, 4)
    for request in requests:
        scheduler.submit(request, 0.0)
    while any(not sequence.num_generated for sequence in scheduler._running) or scheduler.num_waiting:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, runner.submit(plan).result(), 0.0)
    plans = [scheduler.plan(0.0) for _ in range(5)]
    assert [len(plan.slices) if plan is not None else 0 for plan in plans] == [2, 2, 2, 2, 0]

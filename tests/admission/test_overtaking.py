"""Short requests overtake long ones of their own tenant, and no long one is delayed by more than it costs itself."""

import itertools
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.admission.admission import Admission
from penstock.admission.ledger import expected_cost
from penstock.admission.queue import MAX_OVERTAKEN, SHORT_FACTOR, ModelQueue, Waiting
from penstock.admission.settings import AdmissionSettings
from penstock.router.request import EdgeRequest
from tests.admission.simulation import Simulation, percentile
from tests.examples import examples

CHAT_TOKENS = 6


@pytest.mark.parametrize("comes_back", [False, True], ids=["once", "who is refused comes back"])
def test_in_a_flood_of_long_prompts_the_same_tenants_chats_are_let_in(comes_back: bool) -> None:
    sim = Simulation(Admission())
    sim.comes_back = comes_back
    sim.arrivals(40.0, 20.0, tenant="t", prompt=(3000, 8000), output=(20, 60))
    chat = (CHAT_TOKENS, CHAT_TOKENS)
    sim.arrivals(2.5, 20.0, tenant="t", since=6.0, prompt=chat, output=chat)
    sim.run(60.0)
    assert any(job.request.prompt_tokens > CHAT_TOKENS for job, _ in sim.refused), "there was no flood"
    assert not [shed.reason for job, shed in sim.refused if job.request.prompt_tokens == CHAT_TOKENS]
    chats = [job.ttft or 0.0 for job in sim.finished if job.request.prompt_tokens == CHAT_TOKENS]
    others = [job.ttft or 0.0 for job in sim.finished if job.request.prompt_tokens > CHAT_TOKENS]
    assert len(chats) > 25
    assert percentile(chats, 0.95) < percentile(others, 0.5) / 4


def test_chats_beyond_what_a_long_prompt_costs_wait_behind_it() -> None:
    queue = ModelQueue(AdmissionSettings())
    long = push(queue, 1000)
    chats = [push(queue, 100) for _ in range(20)]
    assert leave(queue) == [*chats[:10], long, *chats[10:]]


def test_requests_of_about_the_same_size_are_first_come_first_served() -> None:
    queue = ModelQueue(AdmissionSettings())
    items = [push(queue, cost) for cost in (300, 100, 299, 101, 250)]
    assert leave(queue) == items


def test_a_long_prompt_is_not_overtaken_by_another_tenants_turn_more_than_before() -> None:
    """Turns of tenants are counted as ever: overtaking is inside a line."""
    queue = ModelQueue(AdmissionSettings())
    ours = [push(queue, 1000, "a"), push(queue, 10, "a")]
    theirs = [push(queue, 1000, "b"), push(queue, 10, "b")]
    assert leave(queue) == [ours[1], theirs[1], ours[0], theirs[0]]


def test_what_is_expected_of_a_short_request_is_what_it_then_waits_behind() -> None:
    queue = ModelQueue(AdmissionSettings())
    for _ in range(20):
        push(queue, 1000)
    alone_s = ModelQueue(AdmissionSettings()).wait_s(request(10), 0.0, 100.0)
    rate = queue.pace.rate(0.0)
    assert queue.wait_s(request(10), 0.0, 100.0) == pytest.approx(10 / rate) == pytest.approx(alone_s)
    assert queue.wait_s(request(1000), 0.0, 100.0) == pytest.approx(21_000 / rate)


def test_short_requests_use_of_the_places_kept_for_long_ones_no_more_than_is_kept() -> None:
    queue = ModelQueue(AdmissionSettings())
    push(queue, 100)
    for number in range(3):
        queue.promise(request(1000, fingerprint=number + 1), due=5.0)
    rate = queue.line(request(1)).pace.rate(0.0)

    def num_kept() -> float:
        return (queue.wait_s(request(100), 0.0, 100.0) * rate - 100) - sum(
            item.cost for item in queue.line(request(1)).items
        )

    for _ in range(30):
        assert num_kept() == pytest.approx(0)
        push(queue, 100)
    assert num_kept() == pytest.approx(3000)


STEPS = st.lists(st.one_of(st.integers(1, 2000), st.none(), st.just("leave")), max_size=80)


@given(STEPS, st.integers(1, 3))
@settings(max_examples=examples(50))
def test_nobody_is_overtaken_by_more_than_it_costs_or_by_one_of_its_size(
    steps: list[int | str | None], num_tenants: int
) -> None:
    """A number: a request of that cost comes; None: the first leaves; "leave": the last client goes away."""
    queue, overtaken, waiting = ModelQueue(AdmissionSettings()), Counter[str](), dict[str, Waiting]()
    tenants = itertools.cycle("abc"[:num_tenants])
    for step in steps:
        if isinstance(step, int):
            item = push(queue, step, next(tenants))
            waiting[item.request.id] = item
        elif step is None and (found := queue.next(0.0)) is not None:
            queue.give(found, 0.0)
            del waiting[found.request.id]
            for other in waiting.values():
                if other.request.tenant == found.request.tenant and other.order < found.order:
                    assert found.cost * SHORT_FACTOR <= other.cost
                    overtaken[other.request.id] += found.cost
                    assert overtaken[other.request.id] <= MAX_OVERTAKEN * other.cost
        elif step == "leave" and waiting:
            queue.remove(waiting.popitem()[0])
    assert len(queue) == len(waiting)


_ids = itertools.count()


def request(cost: int, tenant: str = "t", fingerprint: int = 0) -> EdgeRequest:
    found = EdgeRequest(f"q{next(_ids)}", "m", cost, 0, tenant, fingerprint=fingerprint)
    assert expected_cost(found) == cost
    return found


def push(queue: ModelQueue, cost: int, tenant: str = "t") -> Waiting:
    return queue.push(request(cost, tenant), 0.0, 1e9, 100.0, is_promised=False, most_kv=1 << 40)


def leave(queue: ModelQueue) -> list[Waiting]:
    """All, in their order."""
    found = []
    while (item := queue.next(0.0)) is not None:
        queue.give(item, 0.0)
        found.append(item)
    return found

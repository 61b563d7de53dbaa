from __future__ import annotations

import pytest

from penstock.bench.load import closed_loop
from penstock.bench.workloads import Workload
from tests.bench.fake_server import FakeServer, serving

TINY = Workload("tiny", prompt_tokens=3, output_tokens=5, concurrency=2, num_requests=6)
PROMPTS = [f" these words{n} differ" for n in range(TINY.num_requests)]


async def test_every_prompt_is_asked_once_with_no_more_at_a_time_than_the_workload_says() -> None:
    async with serving(FakeServer(token_s=0.002)) as fake:
        outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS)
    assert sorted(body["prompt"] for body in fake.bodies) == PROMPTS
    assert fake.most_running == TINY.concurrency
    assert outcome.failures == []
    assert [(answer.prompt_tokens, answer.output_tokens) for answer in outcome.answers] == [(3, 5)] * 6


async def test_latencies_are_those_of_the_server() -> None:
    async with serving(FakeServer(token_s=0.05)) as fake:
        outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS[:2])
    for answer in outcome.answers:
        assert answer.ttft_s >= 0.05
        assert answer.tpot_s == pytest.approx(0.05, rel=0.3)
    assert outcome.wall_s >= 0.25


async def test_a_refused_request_is_counted_and_the_load_goes_on() -> None:
    async with serving(FakeServer(refuse_every=3)) as fake:
        outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS)
    assert len(outcome.answers) == 4
    assert len(outcome.failures) == 2
    assert all("503" in failure and "busy" in failure for failure in outcome.failures)


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    async with serving(FakeServer()) as fake:
        pass
    outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS)
    assert len(outcome.failures) == TINY.num_requests


async def test_every_request_asks_for_the_same_work() -> None:
    async with serving(FakeServer()) as fake:
        await closed_loop(fake.url, "fake", TINY, PROMPTS[:1])
    (body,) = fake.bodies
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 5, 0)
    assert body["ignore_eos"] is body["stream"] is body["stream_options"]["include_usage"] is True

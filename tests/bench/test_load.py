from __future__ import annotations

import pytest

from penstock.bench import rounds
from penstock.bench.load import Run
from penstock.bench.rounds import closed_loop
from penstock.bench.workloads import Workload
from tests.bench.fake_server import FakeServer, MemoryClient, serving
from tests.virtual_time import in_virtual_time

TINY = Workload("tiny", prompt_tokens=3, output_tokens=5, concurrency=2, num_requests=6)
PROMPTS = [f" these words{n} differ" for n in range(TINY.num_requests)]


async def closed_in_memory(fake: FakeServer, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(rounds, "Client", lambda url, **_: MemoryClient(fake))
    return await closed_loop("http://127.0.0.1:1", "fake", TINY, prompts)


@in_virtual_time
async def test_every_prompt_is_asked_once_with_no_more_at_a_time_than_the_workload_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeServer(token_s=0.002)
    outcome = await closed_in_memory(fake, PROMPTS, monkeypatch)
    assert sorted(body["prompt"] for body in fake.bodies) == PROMPTS
    assert fake.most_running == TINY.concurrency
    assert [(one.error, one.prompt_tokens, one.output_tokens) for one in outcome.results] == [(None, 3, 5)] * 6


@in_virtual_time
async def test_latencies_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = await closed_in_memory(FakeServer(token_s=0.05), PROMPTS[:2], monkeypatch)
    assert [one.ttft_s for one in outcome.results] == pytest.approx([0.05] * 2)
    assert [one.tpot_s for one in outcome.results] == pytest.approx([0.05] * 2)
    assert outcome.wall_s == pytest.approx(0.25)


async def test_over_a_connection_a_latency_is_no_less_than_the_servers() -> None:
    async with serving(FakeServer(token_s=0.01)) as fake:
        outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS[:1])
    (answer,) = outcome.results
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.01
    assert outcome.wall_s >= 0.05


async def test_a_refused_request_is_counted_and_the_load_goes_on() -> None:
    async with serving(FakeServer(refuse_every=3)) as fake:
        outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS)
    assert sum(one.error is None for one in outcome.results) == 4
    failures = [one for one in outcome.results if one.error is not None]
    assert len(failures) == 2
    assert all(one.error == "http_503" and "busy" in one.message for one in failures)


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    async with serving(FakeServer()) as fake:
        pass
    outcome = await closed_loop(fake.url, "fake", TINY, PROMPTS)
    assert [one.error for one in outcome.results] == ["refused"] * TINY.num_requests


async def test_every_request_asks_for_the_same_work() -> None:
    async with serving(FakeServer()) as fake:
        await closed_loop(fake.url, "fake", TINY, PROMPTS[:1])
    (body,) = fake.bodies
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 5, 0)
    assert body["ignore_eos"] is body["stream"] is body["stream_options"]["include_usage"] is True

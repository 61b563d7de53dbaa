"""Real vLLM, on the CPU: the same contract as every server, and its KV events hashed as the router hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.core.hashing import routing_hashes
from penstock.dialects.engines.vllm import VLLM
from penstock.dialects.requests import RequestOptions, outgoing, refuses_priority
from penstock.gateway.replicas.zmq_events import EventSource
from tests.gateway.following import following
from tests.gateway.replicas.test_engine_poller import meets_the_contract
from tests.gateway.replicas.test_zmq_events import reading
from tests.peers.peers import checkpoint, free_port, starting_vllm
from tests.waiting import eventually_async

pytestmark = pytest.mark.slow
LONG = " ".join(f"Sentence {number} is here." for number in range(150))


@dataclass
class Vllm:
    url: str
    source: EventSource
    model: Path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    home = tmp_path_factory.mktemp("vllm")
    live, replay = free_port(), free_port()
    events = (
        f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{live}",'
        f'"replay_endpoint":"tcp://*:{replay}","topic":"kv"}}'
    )
    model = checkpoint(home)
    with starting_vllm(model, home / "log", "--kv-events-config", events) as started:
        started.wait()
        source = EventSource("vllm", f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", "kv")
        yield Vllm(started.url, source, model)


async def test_vllm_meets_the_contract(vllm: Vllm) -> None:
    async with following(vllm.url, model="m") as found:
        await meets_the_contract(found, "vllm")
        assert found.seen.limits.max_model_len == 2048
        assert found.seen.limits.kv_capacity_tokens > 2048
        calls = [
            found.send("/v1/completions", b'{"model":"m","prompt":"Once","max_tokens":400,"stream":true}')[0]
            for _ in range(3)
        ]
        await eventually_async(lambda: found.seen.load.num_running, lambda count: count == 3)
        steps = found.seen.load.steps
        await eventually_async(lambda: found.seen.load.steps, lambda count: count > steps)
        for call in calls:
            call.cancel()
        await eventually_async(lambda: found.seen.sequences, lambda count: count == 0)


async def test_a_priority_is_taken_or_refused_as_the_table_says(vllm: Vllm) -> None:
    async with following(vllm.url, model="m", dialect="vllm") as found:
        said = await found.ask(prompt="Hi", max_tokens=1, priority=-1)
        assert said.status == 200 or refuses_priority(VLLM, said.status, said.body)


async def test_what_vllm_caches_is_known_by_the_routers_hashes_and_again_after_a_restart(vllm: Vllm) -> None:
    tokens = Tokenizer.from_file(str(vllm.model / "tokenizer.json")).encode(LONG, add_special_tokens=False).ids
    wanted = set(routing_hashes("acme", tokens))
    assert len(wanted) >= 3
    async with following(vllm.url, model="m", dialect="vllm") as found, reading(vllm.source) as index:
        asked = {"model": "m", "prompt": LONG, "max_tokens": 1}
        _, said = found.send(
            "/v1/completions", outgoing(VLLM, json.dumps(asked).encode(), RequestOptions(salt="acme".__add__))
        )
        await said.over.wait()
        await eventually_async(lambda: wanted - index.known, lambda unknown: not unknown)
        assert index.is_approximate is False
    async with reading(vllm.source) as index:  # a gateway that starts late
        await eventually_async(lambda: wanted - index.known, lambda unknown: not unknown)

"""Real SGLang, on the CPU: the same contract as every server, and its KV events hashed as the router hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.core.hashing import routing_hashes
from penstock.core.request import Priority
from penstock.dialects.engines.sglang import SGLANG
from penstock.dialects.requests import RequestOptions, outgoing
from penstock.gateway.replicas.zmq_events import EventSource
from tests.gateway.following import following
from tests.gateway.replicas.test_engine_poller import meets_the_contract
from tests.gateway.replicas.test_zmq_events import reading
from tests.peers.peers import checkpoint, free_port, starting_sglang
from tests.waiting import eventually_async

pytestmark = pytest.mark.slow
LONG = " ".join(f"Sentence {number} is here." for number in range(150))


@dataclass
class Sglang:
    url: str
    source: EventSource
    model: Path


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    home = tmp_path_factory.mktemp("sglang")
    live, replay = free_port(), free_port()
    events = (
        f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{live}",'
        f'"replay_endpoint":"tcp://*:{replay}","topic":"kv"}}'
    )
    model = checkpoint(home)
    flags = ["--kv-events-config", events, "--enable-priority-scheduling", "--page-size", "16"]
    with starting_sglang(model, home / "log", *flags) as started:
        started.wait()
        source = EventSource("sglang", f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", "kv")
        yield Sglang(started.url, source, model)


async def test_sglang_meets_the_contract(sglang: Sglang) -> None:
    async with following(sglang.url, model="m") as found:
        await meets_the_contract(found, "sglang")
        assert found.seen.limits.max_model_len == 2048
        assert found.seen.limits.kv_capacity_tokens == 8192
        calls = [
            found.send("/v1/completions", b'{"model":"m","prompt":"Once","max_tokens":1500,"stream":true}')[0]
            for _ in range(3)
        ]
        await eventually_async(lambda: found.seen.load.num_running, lambda count: count == 3)
        for call in calls:
            call.cancel()
        await eventually_async(lambda: found.seen.load.num_running, lambda count: count == 0)


async def test_what_the_gateway_adds_to_a_request_is_taken(sglang: Sglang) -> None:
    options = RequestOptions(priority=Priority.HIGH, salt="acme".__add__, request_id="one")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "A number?"}],
        "max_tokens": 100,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
    }
    async with following(sglang.url, model="m", dialect="sglang") as found:
        _, said = found.send("/v1/chat/completions", outgoing(SGLANG, json.dumps(asked).encode(), options))
        await said.over.wait()
        assert said.status == 200
        assert said.json["id"] == "one"


async def test_what_sglang_caches_is_known_by_the_routers_hashes_and_again_after_a_restart(sglang: Sglang) -> None:
    tokens = Tokenizer.from_file(str(sglang.model / "tokenizer.json")).encode(LONG, add_special_tokens=False).ids
    wanted = set(routing_hashes("acme", tokens))
    assert len(wanted) >= 3
    async with following(sglang.url, model="m", dialect="sglang") as found, reading(sglang.source) as index:
        asked = {"model": "m", "prompt": LONG, "max_tokens": 1}
        _, said = found.send(
            "/v1/completions", outgoing(SGLANG, json.dumps(asked).encode(), RequestOptions(salt="acme".__add__))
        )
        await said.over.wait()
        await eventually_async(lambda: wanted - index.known, lambda unknown: not unknown)
        assert index.is_approximate is False
    async with reading(sglang.source) as index:  # a gateway that starts late
        await eventually_async(lambda: wanted - index.known, lambda unknown: not unknown)

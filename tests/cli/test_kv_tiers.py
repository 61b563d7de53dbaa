"""Two real replicas with a host tier and a real gateway: a prompt goes to the replica that has it in host memory."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import openai
import pytest
from tools.drills.pressure import samples
from tools.drills.stand import BY_PREFIX, MODEL, Process, stand

from penstock.gateway.records.decisions import read_decisions
from tests.cli.real_server import SLOW
from tests.sdk import Unverified
from tests.waiting import eventually

pytestmark = pytest.mark.slow

TOKENS = 900  # of a prompt: three routing blocks
CACHE = 16_384  # tokens on the device
ON_HOST = 5  # prompts that surely no longer are


def ask(server: Process, prompt: list[int]) -> tuple[str, int]:
    """By which way, and how many tokens were there already."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=Unverified())
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return raw.headers.get("x-penstock-route", ""), usage.prompt_tokens_details.cached_tokens or 0


def exact_replicas(gateway: Process) -> float:
    """Replicas whose KV blocks the gateway knows from their events."""
    return sum(sample.value for sample in samples(gateway) if sample.name == "penstock_gateway_replica_kv_exact")


def test_a_prompt_that_only_one_replicas_host_has_goes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(TOKENS)] for _ in range(CACHE // TOKENS + ON_HOST + 3)]
    with stand(tmp_path, context=1024, **SLOW) as place:
        flags = ("--max-num-seqs", "2", "--host-kv-gib", "0.05", "--speculate", "off")
        one, other = (place.replica(*flags) for _ in range(2))
        eventually(lambda: (one.is_ready(), other.is_ready()), all)
        for prompt in prompts:
            ask(one, prompt)
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))  # for the gateway's decisions; replicas find their kernels
        gateway = place.gateway(one, other, **BY_PREFIX)
        eventually(lambda: exact_replicas(gateway), lambda exact: exact == 2)
        assert ";matched=768;of=2" in ask(gateway, prompts[-1])[0]
        before = other.get("/v1/penstock/snapshot")["prompt_tokens"]
        for prompt in prompts[:ON_HOST]:
            eventually(gateway.known_work, lambda found: not any(found))  # one that computes is spared another prompt
            route, cached = ask(gateway, prompt)
            assert re.search(r";matched=768;on_host=768;of=2;", route), route
            assert cached >= 768
            # On the device again.
            eventually(partial(ask, gateway, prompt), lambda answer: ";matched=768;of=2" in answer[0])
        assert other.get("/v1/penstock/snapshot")["prompt_tokens"] == before
        report = one.get("/v1/penstock/snapshot")
        assert report["host_tokens_per_s"] > 0
        assert place.complaints() == []
        gateway.end()
    decisions = read_decisions(tmp_path / "decisions" / "gateway.log")
    seen = [choice.candidates for found in decisions for choice in found.decisions]
    on_host = [found.on_host for choice in seen for found in choice if found.on_host]
    assert set(on_host) == {3}
    assert len(on_host) >= ON_HOST

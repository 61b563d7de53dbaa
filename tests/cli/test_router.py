"""Real replicas behind real gateways: requests meet their prompt's beginning, also after a gateway's restart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import openai
import pytest
from tools.drills.pressure import samples
from tools.drills.stand import BY_PREFIX, MODEL, Process, stand

from tests.sdk import Unverified
from tests.waiting import eventually

pytestmark = pytest.mark.slow

PREFIXES = [f"{name} " + "the words of a long beginning that many questions share " * 30 for name in "abcdefgh"]


@cache
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=Unverified(), timeout=60
    )


def post(server: Process, content: str, max_tokens: int = 1) -> tuple[Mapping[str, str], int]:
    """The headers of the answer, and how many tokens of the prompt were there already."""
    raw = client(server).chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=max_tokens
    )
    usage = raw.parse().usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return raw.headers, (details.cached_tokens or 0) if details is not None else 0


def ask(gateway: Process, prefix: str, question: str) -> tuple[str, int, str]:
    """Where it was answered, how many tokens were there already, and the reasons of the pick. It is asked when the
    gateway has heard that no replica works: one that computes a prompt is spared another."""
    eventually(gateway.known_work, lambda found: not any(found))
    headers, cached = post(gateway, prefix + question, max_tokens=2)
    return headers["x-penstock-replica"], cached, headers["x-penstock-route"]


def is_exact(route: str) -> bool:
    return ";matched=" in route and ";approximate" not in route


def num_known(gateway: Process) -> float:
    """Replicas whose KV blocks the gateway knows from their events, by its metrics. To ask with prompts would push the
    prefixes that the test is about out of the caches: the slower the machine, the more of them."""
    return sum(each.value for each in samples(gateway) if each.name == "penstock_gateway_replica_kv_exact")


def fill(gateway: Process, replicas: list[Process]) -> dict[str, str]:
    """Where each of the prefixes was answered. The engines stand still until every replica has one: one by one they
    might all go to the quickest."""
    with ThreadPoolExecutor(len(PREFIXES)) as pool, contextlib.ExitStack() as engines:
        for replica in replicas:
            engines.enter_context(replica.engine_stopped())
        asked = [pool.submit(post, gateway, prefix + "one") for prefix in PREFIXES]
        eventually(
            lambda: [one["in_flight"] for one in gateway.get("/admin/v1/replicas")["replicas"]],
            lambda counts: all(counts),
        )
        engines.close()
        return {prefix: one.result()[0]["x-penstock-replica"] for prefix, one in zip(PREFIXES, asked, strict=True)}


def test_a_restarted_gateway_knows_who_holds_what(tmp_path: Path) -> None:
    with stand(tmp_path) as place:
        replicas = [place.replica() for _ in range(3)]
        first = place.gateway(*replicas, **BY_PREFIX)
        eventually(lambda: num_known(first), lambda count: count == len(replicas))
        homes = fill(first, replicas)
        assert len(set(homes.values())) == len(replicas)  # who is idle shares what nobody holds
        for prefix, home in homes.items():
            where, _, why = ask(first, prefix, "two")
            assert where == home, why
        first.end()
        second = place.gateway(*replicas, **BY_PREFIX)
        eventually(lambda: num_known(second), lambda count: count == len(replicas))
        for prefix, home in homes.items():
            where, cached, why = ask(second, prefix, "three")
            assert where == home, why
            assert cached > 256


@pytest.mark.drill
def test_a_restarted_gateway_knows_it_within_a_second(tmp_path: Path) -> None:
    with stand(tmp_path) as place:
        replicas = [place.replica() for _ in range(3)]
        first = place.gateway(*replicas)
        eventually(lambda: post(first, PREFIXES[0])[0]["x-penstock-route"], is_exact)
        began = time.monotonic()
        for question in range(8):
            ask(first, PREFIXES[0], str(question))
        answer_s = (time.monotonic() - began) / 8  # on this machine, as busy as it is
        first.end()
        second = place.gateway(*replicas)
        began = time.monotonic()
        eventually(lambda: post(second, PREFIXES[0])[0]["x-penstock-route"], is_exact)
        assert time.monotonic() - began < 1.0 + 2 * answer_s

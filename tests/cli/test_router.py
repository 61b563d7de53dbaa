"""Real replicas behind real gateways: requests meet their prompt's beginning, also after a gateway's restart."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tools.drills.stand import MODEL, Process, stand

from tests.sdk import Unverified

pytestmark = pytest.mark.slow

PREFIXES = [f"{name} " + "the words of a long beginning that many questions share " * 30 for name in "abcdefgh"]


def ask(gateway: Process, prefix: str, question: str) -> tuple[str, int]:
    """Where it was answered, and how many tokens were there already."""
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=Unverified())
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": prefix + question}], max_tokens=2
    )
    usage = raw.parse().usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return raw.headers["x-penstock-replica"], (details.cached_tokens or 0) if details is not None else 0


def eventually_knows_tokens(gateway: Process) -> None:
    """The first long prompts come before the replicas' tokenizer does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=Unverified())
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": PREFIXES[0] + "warm"}], max_tokens=1
        )
        if ";matched=" in raw.headers["x-penstock-route"] and ";approximate" not in raw.headers["x-penstock-route"]:
            return
        time.sleep(0.1)
    raise AssertionError("prompts are not named")


def test_a_restarted_gateway_knows_within_a_second_who_holds_what(tmp_path: Path) -> None:
    with stand(tmp_path) as place:
        replicas = [place.replica() for _ in range(3)]
        first = place.gateway(*replicas)
        eventually_knows_tokens(first)
        with ThreadPoolExecutor(len(PREFIXES)) as pool:  # at once: one by one they may all go to who is quickest
            homes = dict(zip(PREFIXES, pool.map(lambda prefix: ask(first, prefix, "one")[0], PREFIXES), strict=True))
        assert len(set(homes.values())) > 1  # who is idle shares what nobody holds
        began = time.monotonic()
        assert all(ask(first, prefix, "two")[0] == home for prefix, home in homes.items())
        answer_s = (time.monotonic() - began) / len(PREFIXES)  # on this machine, as busy as it is
        first.end()
        second = place.gateway(*replicas)
        began = time.monotonic()
        eventually_knows_tokens(second)
        assert time.monotonic() - began < 1.0 + 2 * answer_s
        for prefix, home in homes.items():
            where, cached = ask(second, prefix, "three")
            assert where == home
            assert cached > 256

"""`penstock serve` parked and woken: a real model in real processes, and the memory that they give back."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.api.parking import PARK_PATH, WAKE_PATH
from tests.cli.real_server import PATIENCE_S, RealServer, tiny_server, write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 503)) * 8


def post(server: RealServer, path: str, body: object) -> Any:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def answer(server: RealServer, name: str) -> tuple[Any, int]:
    """Its tokens and log probabilities, and how many tokens of the prompt were cached."""
    asked = {"model": name, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    found = post(server, "/v1/completions", asked)
    return found["choices"][0]["logprobs"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_memory_of_the_cache_goes_back_and_answers_are_the_same_to_the_bit(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with tiny_server(tmp_path, "--device", "cpu") as server:
        name = server.model
        before, _ = answer(server, name)
        engine = server.engine_process()
        full = engine.memory_info().rss
        for _ in range(2):
            parked = post(server, PARK_PATH, {})
            assert parked["state"] == "parked"
            given_back = full - engine.memory_info().rss
            assert given_back > parked["num_bytes"] / 2 > 1 << 20, parked
            assert server.status("/ready") == 503
            woken = post(server, WAKE_PATH, {})
            assert woken["seconds"]["first_token"] > 0
            assert answer(server, name) == (before, 0)
            assert answer(server, name)[1] > 0
            assert server.engine_process().pid == engine.pid

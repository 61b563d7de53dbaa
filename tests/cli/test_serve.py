"""The real thing: `penstock serve smollm2`, and what an application does with it."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from tests.cli.real_server import MODEL, RealServer, eventually, real_server

pytestmark = pytest.mark.slow

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story about a river."}]


def chat(server: RealServer, messages: Any = FRANCE, **options: Any) -> openai.types.chat.ChatCompletion:
    options = {"model": MODEL, "max_tokens": 40} | options
    answer: openai.types.chat.ChatCompletion = server.openai.chat.completions.create(messages=messages, **options)
    return answer


def say(server: RealServer, messages: Any = FRANCE, **options: Any) -> str:
    return chat(server, messages, **options).choices[0].message.content or ""


def long_stream(server: RealServer, max_tokens: int = 2000, **options: Any) -> openai.Stream[Any]:
    body = {"ignore_eos": True}
    return server.openai.chat.completions.create(  # type: ignore[no-any-return]
        model=MODEL, messages=STORY, max_tokens=max_tokens, stream=True, extra_body=body, **options
    )


# -- what it says of itself


def test_it_prints_its_address_and_a_command_that_works(server: RealServer) -> None:
    assert MODEL in server.banner
    command = next(line.strip() for line in server.banner.splitlines() if "curl" in line)
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert " sky" in answer
    assert answer.rstrip().endswith("data: [DONE]")


def test_it_is_well(server: RealServer) -> None:
    assert [server.status(path) for path in ("/health", "/ready", "/health/deep")] == [200, 200, 200]


# -- answers


def test_it_knows_the_capital_of_france(server: RealServer) -> None:
    answer = chat(server, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(server: RealServer) -> None:
    stream = server.openai.chat.completions.create(
        model=MODEL, messages=FRANCE, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = chat(server, temperature=0)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_stop_string_ends_the_answer(server: RealServer) -> None:
    whole = say(server, temperature=0)
    stop = whole[10:18]
    answer = chat(server, temperature=0, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_choices_differ_and_a_seed_repeats_them_exactly_whatever_else_runs(server: RealServer) -> None:
    def texts() -> list[str | None]:
        answer = chat(server, STORY, n=2, seed=11, temperature=1.0, max_tokens=30)
        return [choice.message.content for choice in answer.choices]

    alone = texts()
    assert alone[0] != alone[1]
    assert texts() == alone
    others = [long_stream(server, seed=i) for i in range(3)]
    for other in others:
        next(iter(other))
    assert texts() == alone
    for other in others:
        other.close()
    eventually(server.is_idle, 2)


def test_logprobs_are_those_of_a_distribution(server: RealServer) -> None:
    answer = chat(server, STORY, temperature=0, max_tokens=12, logprobs=True, top_logprobs=20)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 12
    for entry in entries:
        ordered = [other.logprob for other in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
        assert entry.logprob == ordered[0], "greedy takes the best"
        assert 0.3 < sum(math.exp(logprob) for logprob in ordered) <= 1 + 1e-4
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == answer.choices[0].message.content


def test_a_long_prompt_is_remembered(server: RealServer) -> None:
    text = "The river runs to the sea, and the sea is never full. " * 40
    usages = [server.openai.completions.create(model=MODEL, prompt=text, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] > 400


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1_000_000},
        {"stop": [str(i) for i in range(100)]},
        {"logit_bias": {"49999999": 1}},
        {"extra_body": {"functions": [{"name": "f", "parameters": {}}]}},
        {"messages": [{"role": "user", "content": "word " * 20_000}]},
    ],
)
def test_what_cannot_be_is_refused(server: RealServer, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(server, **options)


# -- clients and engines that go away


def test_streams_that_are_left_end_their_work_within_a_second(server: RealServer) -> None:
    """Some while they are read, some before their first token."""
    chance = random.Random(1)
    connections = [http.client.HTTPConnection(server.host, server.port) for _ in range(20)]
    body = {"model": MODEL, "messages": STORY, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    for seed, connection in enumerate(connections):
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"seed": seed}))
    eventually(lambda: server.metrics()["penstock_requests_open"] == 20, 10)
    for connection in connections:
        time.sleep(chance.random() * 0.1)
        connection.close()
    eventually(server.is_idle, 1)


def test_when_the_engine_is_killed_clients_hear_of_it_and_the_server_recovers(server: RealServer) -> None:
    before = say(server, temperature=0)
    restarts = server.metrics()["penstock_engine_restarts_total"]
    stream = iter(long_stream(server))
    next(stream)
    server.engine_process().kill()
    killed_s = time.monotonic()
    with pytest.raises(openai.APIError):
        list(stream)
    assert time.monotonic() - killed_s < 1
    assert server.status("/health") == 200
    assert server.status("/ready") == 503
    eventually(lambda: server.status("/ready") == 200, 30)
    assert server.metrics()["penstock_engine_restarts_total"] == restarts + 1
    assert say(server, temperature=0) == before


def test_a_stop_signal_to_the_whole_group_lets_running_streams_finish() -> None:
    with real_server() as server:
        engine = server.engine_process()
        stream = iter(long_stream(server, max_tokens=60))
        next(stream)
        os.killpg(server.process.pid, signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        server.process.wait(10)
        assert not psutil.pid_exists(engine.pid)


def test_streams_that_take_longer_than_the_drain_timeout_are_told_why_they_end() -> None:
    with real_server("--drain-timeout", "0.5") as server:
        stream = iter(long_stream(server))
        next(stream)
        server.process.terminate()
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        assert ended.value.code == "request_aborted"
        server.process.wait(10)


def test_the_engine_does_not_outlive_a_server_that_is_killed() -> None:
    with real_server() as server:
        engine = server.engine_process()
        server.process.kill()
        engine.wait(5)


# -- all of it at once


class Soak:
    """Random applications, good and bad, for a while."""

    def __init__(self, server: RealServer, seconds: float) -> None:
        self._server = server
        self._end_s = time.monotonic() + seconds
        self.finished = 0
        self.left = 0
        self.refused = 0
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._end_s:
            outcome = self._ask(chance)
            with self._lock:
                setattr(self, outcome, getattr(self, outcome) + 1)

    def _ask(self, chance: random.Random) -> str:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": chance.choice([1, 5, 20, 60]),
            "temperature": chance.choice([0, 0.7, 1.5]),
            "n": chance.choice([1, 1, 1, 3]),
            "seed": chance.choice([None, 3]),
            "stop": chance.choice([None, "the", [".", "\n"]]),
            "presence_penalty": chance.choice([0, 1.0]),
            "logit_bias": chance.choice([None, {"100": 5}]),
            "extra_body": {
                "top_k": chance.choice([-1, 20]),
                "priority": chance.choice(["high", "normal", "low"]),
                "repetition_penalty": chance.choice([1.0, 1.2]),
                "cache_salt": chance.choice([None, "a"]),
            },
        }
        prompt = "word " * chance.choice([1, 10, 100, 500]) + str(chance.randrange(5))
        if chance.random() < 0.1:
            body["temperature"] = -1
        stream_length = chance.choice([None, 1, 3, 1000])
        try:
            if chance.random() < 0.5:
                return self._completion(prompt, body, stream_length)
            return self._chat(prompt, body | {"logprobs": chance.choice([None, True])}, stream_length)
        except openai.BadRequestError:
            return "refused"

    def _completion(self, prompt: str, body: dict[str, Any], stream_length: int | None) -> str:
        if stream_length is None:
            assert self._server.openai.completions.create(prompt=prompt, **body).choices
            return "finished"
        return self._read(self._server.openai.completions.create(prompt=prompt, stream=True, **body), stream_length)

    def _chat(self, prompt: str, body: dict[str, Any], stream_length: int | None) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        if stream_length is None:
            assert self._server.openai.chat.completions.create(messages=messages, **body).choices
            return "finished"
        stream = self._server.openai.chat.completions.create(messages=messages, stream=True, **body)
        return self._read(stream, stream_length)

    @staticmethod
    def _read(stream: openai.Stream[Any], length: int) -> str:
        for index, _ in enumerate(stream):
            if index == length:
                stream.close()
                return "left"
        return "finished"


def test_a_soak_of_mixed_requests_leaves_nothing_behind(server: RealServer) -> None:
    before = say(server, STORY, temperature=0)
    restarts = server.metrics()["penstock_engine_restarts_total"]
    soak = Soak(server, seconds=10)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(soak.run, range(12)))
    eventually(server.is_idle, 2)
    assert min(soak.finished, soak.left, soak.refused) > 0
    assert server.metrics()["penstock_engine_restarts_total"] == restarts
    assert say(server, STORY, temperature=0) == before

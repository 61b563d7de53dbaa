"""The real thing: `penstock serve smollm2`, and what an application does with it. Where no text has to make sense, a
random model of two layers takes its place: the processes, the API and what is promised of them are the same."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.cli.real_server import MODEL, TINY_CONTEXT, RealServer, tiny_server
from tests.waiting import eventually

pytestmark = pytest.mark.slow

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story about a river."}]


def chat(server: RealServer, messages: Any = FRANCE, **options: Any) -> openai.types.chat.ChatCompletion:
    options = {"model": server.model, "max_tokens": 40} | options
    answer: openai.types.chat.ChatCompletion = server.openai.chat.completions.create(messages=messages, **options)
    return answer


def say(server: RealServer, messages: Any = FRANCE, **options: Any) -> str:
    return chat(server, messages, **options).choices[0].message.content or ""


def long_stream(server: RealServer, max_tokens: int = TINY_CONTEXT - 1000, **options: Any) -> openai.Stream[Any]:
    """Of the random model, so long that it surely runs until somebody ends it."""
    body = {"ignore_eos": True}
    return server.openai.chat.completions.create(  # type: ignore[no-any-return]
        model=server.model, messages=STORY, max_tokens=max_tokens, stream=True, extra_body=body, **options
    )


# -- what it says of itself


def test_it_prints_its_address_and_a_command_that_works(server: RealServer) -> None:
    assert MODEL in server.banner
    command = next(line.strip() for line in server.banner.splitlines() if "curl" in line)
    shortened = command.replace('"stream":true', '"stream":true,"max_tokens":24')
    assert shortened != command
    answer = subprocess.run(shortened, shell=True, capture_output=True, text=True, check=True).stdout
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


def test_choices_differ_and_a_seed_repeats_them_exactly_whatever_else_runs(tiny: RealServer) -> None:
    def texts() -> list[str | None]:
        answer = chat(tiny, STORY, n=2, seed=11, temperature=1.0, max_tokens=60)
        return [choice.message.content for choice in answer.choices]

    alone = texts()
    assert alone[0] != alone[1]
    assert texts() == alone
    others = [long_stream(tiny, seed=i) for i in range(3)]
    for other in others:
        next(iter(other))
    assert texts() == alone
    assert tiny.metrics()["penstock_sequences_running"] == 3
    for other in others:
        other.close()
    eventually(tiny.left_over, lambda left: left == {})


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


def test_streams_that_are_left_end_their_work(tiny: RealServer) -> None:
    """Some while they are read, some before their first token. Each would run for minutes."""
    aborted = tiny.outcomes()["request_aborted"]
    connections = [http.client.HTTPConnection(tiny.host, tiny.port) for _ in range(20)]
    body = {"model": tiny.model, "messages": STORY, "max_tokens": 60_000, "stream": True, "ignore_eos": True}
    for seed, connection in enumerate(connections):
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"seed": seed}))
    eventually(lambda: tiny.metrics()["penstock_requests_open"], lambda num_open: num_open == 20)
    for connection in connections[::2]:
        assert connection.getresponse().readline().startswith(b"data: ")
    for connection in connections:
        connection.close()
    eventually(tiny.left_over, lambda left: left == {})
    eventually(lambda: tiny.outcomes()["request_aborted"], lambda found: found == aborted + 20)


def test_cold_start_is_told_phase_by_phase_and_that_of_an_engine_started_again_by_its_own(tiny_model: Path) -> None:
    with tiny_server(tiny_model, forks=False) as server:  # a forked engine imports next to nothing, which is not told

        def phases() -> list[str]:
            with urllib.request.urlopen(f"{server.url}/v1/penstock/snapshot") as answer:
                return list(json.load(answer)["startup_s"])

        of_engine = ["process", "import", "files", "kernels", "weights", "cache", "engine", "report"]
        assert phases() == ["python", "check", "http", *of_engine, "tokenizer", "open"]
        assert re.search(r"ready in [\d.]+ s: python [\d.]+, .*import [\d.]+", server.banner)
        server.engine_process().kill()
        eventually(phases, lambda found: found == of_engine)


def test_when_the_engine_is_killed_clients_hear_of_it_and_the_server_recovers(tiny: RealServer) -> None:
    before = say(tiny, temperature=0)
    restarts = tiny.metrics()["penstock_engine_restarts_total"]
    stream = iter(long_stream(tiny))
    next(stream)
    tiny.engine_process().kill()
    with pytest.raises(openai.APIError) as ended:
        list(stream)
    assert ended.value.code == "engine_failed"
    assert tiny.status("/health") == 200
    eventually(lambda: tiny.status("/ready"), lambda status: status == 200)
    assert tiny.metrics()["penstock_engine_restarts_total"] == restarts + 1
    assert say(tiny, temperature=0) == before


def test_a_stop_signal_to_the_whole_group_lets_running_streams_finish(tiny_model: Path) -> None:
    with tiny_server(tiny_model, "--drain-timeout", "600", forks=False) as server:
        engine = server.engine_process()
        stream = iter(long_stream(server, max_tokens=3000))
        next(stream)
        os.killpg(server.process.pid, signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        server.process.wait()
        assert not psutil.pid_exists(engine.pid)


def test_streams_that_take_longer_than_the_drain_timeout_are_told_why_they_end(tiny_model: Path) -> None:
    with tiny_server(tiny_model, "--drain-timeout", "0.5") as server:
        stream = iter(long_stream(server))
        next(stream)
        server.process.terminate()
        with pytest.raises(openai.APIError) as ended:
            list(stream)
        assert ended.value.code == "request_aborted"
        server.process.wait()


@pytest.mark.parametrize("forks", [True, False])
def test_the_engine_does_not_outlive_a_server_that_is_killed(tiny_model: Path, forks: bool) -> None:
    with tiny_server(tiny_model, forks=forks) as server:
        engine = server.engine_process()
        server.process.kill()
        eventually(engine.is_running, lambda runs: not runs)


# -- all of it at once


class Soak:
    """Random applications, good and bad, each with so many requests."""

    def __init__(self, server: RealServer, num_requests: int) -> None:
        self._server = server
        self._num_requests = num_requests

    def run(self, seed: int) -> Counter[str]:
        chance = random.Random(seed)
        return Counter(self._ask(chance) for _ in range(self._num_requests))

    def _ask(self, chance: random.Random) -> str:
        body: dict[str, Any] = {
            "model": self._server.model,
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


def test_a_soak_of_mixed_requests_leaves_nothing_behind(tiny: RealServer) -> None:
    before = say(tiny, STORY, temperature=0)
    restarts = tiny.metrics()["penstock_engine_restarts_total"]
    soak = Soak(tiny, num_requests=30)
    with ThreadPoolExecutor(12) as pool:
        ended = sum(pool.map(soak.run, range(12)), Counter())
    eventually(tiny.left_over, lambda left: left == {})
    assert ended.total() == 12 * 30
    assert min(ended[way] for way in ("finished", "left", "refused")) > 10
    assert tiny.metrics()["penstock_engine_restarts_total"] == restarts
    assert say(tiny, STORY, temperature=0) == before

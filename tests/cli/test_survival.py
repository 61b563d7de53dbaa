"""Streams of a real model survive kill -9 and SIGTERM: cut at random, carried on by a second replica, equal text."""

import http.client
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api import relay
from penstock.api.relay import StreamRecord
from tests.cli.real_server import RealServer, real_server
from tests.server.relaying import ask, block_ends, carry_on, events

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a long story about a lighthouse keeper and his three cats."}]
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {
    "seed": 11,
    "temperature": 0.9,
    "top_p": 0.9,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "min_tokens": 20,
    "logit_bias": {"30": -2},
    "stop": ["~~~", "lighthouse keeper's cat"],
}


@pytest.fixture(scope="module")
def survivor() -> Iterator[RealServer]:
    with real_server("--threads", "1") as found:
        yield found


def encoded(**options: Any) -> bytes:
    wanted = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 80, "stream": True}
    return json.dumps(wanted | {"stream_options": {"include_usage": True}} | options).encode()


def address(server: RealServer) -> tuple[str, int]:
    return server.host, server.port


def text_of(stream: bytes) -> str:
    chunks = [json.loads(event[6:]) for event in events(stream)[:-1]]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def summary(stream: bytes) -> list[object]:
    """Why it ended, and how many tokens it took."""
    *_, finish, usage, done = events(stream)
    assert done == b"data: [DONE]"
    counted = json.loads(usage[6:])["usage"]
    return [
        json.loads(finish[6:])["choices"][0]["finish_reason"],
        counted["prompt_tokens"],
        counted["completion_tokens"],
    ]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, {}], ids=["greedy", "sampled", "no seed given"])
def test_wherever_a_stream_is_cut_it_goes_on_as_it_would_have(survivor: RealServer, options: dict[str, Any]) -> None:
    body = encoded(**options)
    whole = ask(address(survivor), CHAT, body)
    ends = block_ends(whole)
    for end in random.Random(5).sample(ends[3:], 4):
        record = StreamRecord()
        record.append(whole[:end])
        found = whole[:end] + carry_on(record, address(survivor), CHAT, body)
        assert text_of(found) == text_of(whole)
        assert summary(found) == summary(whole)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.drill)])
def test_streams_go_on_when_their_replica_goes(survivor: RealServer, how: signal.Signals) -> None:
    bodies = [encoded(**options, n=n) for options in (GREEDY, SAMPLED) for n in (1, 2)]
    wholes = [ask(address(survivor), CHAT, body) for body in bodies]
    with real_server("--threads", "1") as leaving:
        watching = http.client.HTTPConnection(*address(leaving), timeout=60)
        watching.request("GET", "/v1/penstock/snapshots")
        pushed = watching.getresponse()
        connections = [http.client.HTTPConnection(*address(leaving), timeout=60) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            connection.request("POST", CHAT, body, {relay.HEADER: relay.STREAM})
        responses = [connection.getresponse() for connection in connections]
        heads = [b"".join(response.readline() for _ in range(40)) for response in responses]
        if how is signal.SIGKILL:
            leaving.engine_process().kill()
        os.kill(leaving.process.pid, how)
        for index, (response, whole, body) in enumerate(zip(responses, wholes, bodies, strict=True)):
            rest = b""
            try:
                while chunk := response.read1(1 << 16):
                    rest += chunk
            except (http.client.HTTPException, ConnectionError):
                assert how is signal.SIGKILL
            forwarded = heads[index] + rest
            forwarded = forwarded[: block_ends(forwarded)[-1]]  # a gateway forwards whole blocks
            record = StreamRecord()
            record.append(forwarded)
            assert b"[DONE]" not in forwarded
            if how is signal.SIGTERM:
                assert record.is_given_back
            found = forwarded + carry_on(record, address(survivor), CHAT, body)
            assert by_choice_text(found) == by_choice_text(whole)
            assert summary(found)[1:] == summary(whole)[1:]
        if how is signal.SIGTERM:
            assert json.loads(pushed.read().split(b"data: ")[-1])["is_draining"]
            leaving.process.wait(10)  # with nothing left to wait for it ends at once
        watching.close()


def by_choice_text(stream: bytes) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events(stream)[:-1]:
        for choice in json.loads(event[6:])["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts

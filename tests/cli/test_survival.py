"""Streams of a real model survive kill -9 and SIGTERM: cut at random, carried on by a second replica, equal text."""

import contextlib
import http.client
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tools.drills.stand import MODEL, Process, Stand, stand

from penstock.api import relay
from penstock.api.relay import StreamRecord
from tests.cli.real_server import RealServer
from tests.server.relaying import ask, block_ends, carry_on, events
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CONTEXT = 1 << 16
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


def encoded(**options: Any) -> bytes:
    wanted = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(wanted | options).encode()


def address(server: RealServer | Process) -> tuple[str, int]:
    return "127.0.0.1", server.port


def at_once(ask_one: Callable[[Any], bytes], things: Sequence[Any]) -> list[bytes]:
    """Answers to all, which the engine makes together: that is little more work than one."""
    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(ask_one, things))


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


def cut(stream: bytes, end: int) -> StreamRecord:
    record = StreamRecord()
    record.append(stream[:end])
    return record


def test_wherever_a_stream_is_cut_it_goes_on_as_it_would_have(server: RealServer) -> None:
    """Greedy, sampled in every way, and without a seed."""
    bodies = [encoded(model="smollm2", max_tokens=64, **options) for options in (GREEDY, SAMPLED, {})]
    wholes = at_once(lambda body: ask(address(server), CHAT, body), bodies)
    cuts = [
        (body, whole, end)
        for body, whole in zip(bodies, wholes, strict=True)
        for end in random.Random(5).sample(block_ends(whole)[3:], 4)
    ]
    rests = at_once(lambda one: carry_on(cut(one[1], one[2]), address(server), CHAT, one[0]), cuts)
    for (_, whole, end), rest in zip(cuts, rests, strict=True):
        assert text_of(whole[:end] + rest) == text_of(whole)
        assert summary(whole[:end] + rest) == summary(whole)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with stand(tmp_path_factory.mktemp("survival"), context=CONTEXT) as found:
        yield found


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.drill)])
def test_streams_go_on_when_their_replica_goes(place: Stand, how: signal.Signals) -> None:
    survivor, leaving = place.replica(), place.replica()
    tokens = 400
    while not are_carried_on(survivor, leaving, how, tokens):
        leaving = place.replica()
        tokens *= 2  # one of them had ended before it went
        assert tokens < CONTEXT


def are_carried_on(survivor: Process, leaving: Process, how: signal.Signals, tokens: int) -> bool:
    """Whether all streams were open when the replica went, and so were carried on by the survivor."""
    bodies = [
        encoded(model=MODEL, max_tokens=tokens, ignore_eos=True, n=n, **options)
        for options in (GREEDY, SAMPLED)
        for n in (1, 2)
    ]
    for replica in (survivor, leaving):
        eventually(replica.is_ready)
    wholes = at_once(lambda body: ask(address(survivor), CHAT, body), bodies)
    with contextlib.ExitStack() as connections:
        watching, *asked = (
            connections.enter_context(contextlib.closing(http.client.HTTPConnection(*address(leaving), timeout=60)))
            for _ in range(1 + len(bodies))
        )
        watching.request("GET", "/v1/penstock/snapshots")
        pushed = watching.getresponse()
        for connection, body in zip(asked, bodies, strict=True):
            connection.request("POST", CHAT, body, {relay.HEADER: relay.STREAM})
        responses = [connection.getresponse() for connection in asked]
        heads = [b"".join(response.readline() for _ in range(40)) for response in responses]
        if how is signal.SIGKILL:
            leaving.signal(how)
        else:
            os.kill(leaving.pid, how)
            give_back(leaving, [cut(head, block_ends(head)[-1]) for head in heads])
        streams = [head + rest_of(response, how) for head, response in zip(heads, responses, strict=True)]
        if any(b"[DONE]" in stream for stream in streams):
            return False
        if how is signal.SIGTERM:
            assert json.loads(pushed.read().split(b"data: ")[-1])["is_draining"]
            eventually(lambda: not leaving.is_running)  # with nothing left to wait for it ends
    records = [cut(stream, block_ends(stream)[-1]) for stream in streams]  # a gateway forwards whole blocks
    if how is signal.SIGTERM:
        assert all(record.is_given_back for record in records)
    rests = at_once(
        lambda one: carry_on(one[0], address(survivor), CHAT, one[1]), list(zip(records, bodies, strict=True))
    )
    for stream, rest, whole in zip(streams, rests, wholes, strict=True):
        found = stream[: block_ends(stream)[-1]] + rest
        assert by_choice_text(found) == by_choice_text(whole)
        assert summary(found)[1:] == summary(whole)[1:]
    return True


def give_back(leaving: Process, records: list[StreamRecord]) -> None:
    """As a gateway does that has another replica for them."""
    with contextlib.closing(http.client.HTTPConnection(*address(leaving), timeout=60)) as connection:
        asked = json.dumps({"ids": [record.stream_id for record in records]})
        connection.request("POST", relay.GIVE_BACK_PATH, asked, {"content-type": "application/json"})
        assert connection.getresponse().status == 200


def rest_of(response: http.client.HTTPResponse, how: signal.Signals) -> bytes:
    found = b""
    try:
        while chunk := response.read1(1 << 16):
            found += chunk
    except (http.client.HTTPException, ConnectionError):
        assert how is signal.SIGKILL
    return found


def by_choice_text(stream: bytes) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events(stream)[:-1]:
        for choice in json.loads(event[6:])["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts

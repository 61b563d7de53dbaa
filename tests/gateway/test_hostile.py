"""Requests that no client should send, on every surface: none of them holds up the gateway's loop for the others."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from penstock.core.errors import InvalidRequest
from penstock.gateway.proxy.request_view import read
from penstock.gateway.settings.gateway import ModelSettings
from tests.gateway.running import RunningGateway, running_gateway
from tests.hostile import Hostile
from tests.images.hostile import SEEING
from tests.loop_pauses import without_pauses
from tests.server.replica import NAME, Replica
from tests.server.seeing import seeing
from tests.waiting import GIVE_UP_S, eventually

BIG = 7 << 20  # bytes; the gateway takes bodies of eight

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


def body(**fields: object) -> bytes:
    return json.dumps({"model": NAME, "max_tokens": 1, **fields}, ensure_ascii=False, separators=(",", ":")).encode()


def raw(field: str, value: bytes) -> bytes:
    return b'{"model":"%b","max_tokens":1,"%b":%b}' % (NAME.encode(), field.encode(), value)


def many(one: bytes) -> bytes:
    """As many of a JSON value as there is room for."""
    return b"[%b]" % b",".join([one] * (BIG // (len(one) + 1)))


def numbered(count: int) -> dict[str, None]:
    return dict.fromkeys(map(str, range(count)))


def said(content: bytes) -> bytes:
    return b'[{"role":"user","content":%b}]' % content


def chat(content: object) -> bytes:
    return body(messages=[{"role": "user", "content": content}])


CORPUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "long name": (CHAT, lambda: b'{"model":"%b"}' % (b"x" * BIG)),
    "name of escapes": (CHAT, lambda: b'{"model":"%b"}' % (rb"\u0041" * (BIG // 6))),
    "name like a model's": (CHAT, lambda: b'{"model":"%b"}' % (NAME.encode() * (BIG // len(NAME)))),
    "deep nesting": (CHAT, lambda: raw("messages", b"[" * (BIG // 2) + b"]" * (BIG // 2))),
    "deep in a field nobody reads": (CHAT, lambda: raw("x", b'{"a":' * (BIG // 7) + b"1" + b"}" * (BIG // 7))),
    "wide in a field nobody reads": (CHAT, lambda: raw("x", many(b"[]"))),
    "many fields": (CHAT, lambda: b'{"model":"%b",%b}' % (NAME.encode(), b",".join([b'"a":1'] * (BIG // 6)))),
    "long user": (CHAT, lambda: body(messages=[], user="u" * BIG)),
    "long cache key": (CHAT, lambda: body(messages=[], prompt_cache_key="ü" * (BIG // 2))),
    "much metadata": (CHAT, lambda: body(messages=[], metadata=numbered(BIG // 12))),
    "long user_id": (MESSAGES, lambda: body(messages=[], metadata={"user_id": "u" * BIG})),
    "many template arguments": (CHAT, lambda: body(messages=[], chat_template_kwargs=numbered(BIG // 12))),
    "one long message": (CHAT, lambda: chat("the fox " * (BIG // 8))),
    "message of escapes": (CHAT, lambda: raw("messages", said(b'"%b"' % (rb"\u00e9" * (BIG // 6))))),
    "message without spaces": (CHAT, lambda: chat("a" * BIG)),
    "many messages": (CHAT, lambda: raw("messages", many(b'{"role":"user","content":""}'))),
    "many parts": (CHAT, lambda: raw("messages", said(many(b'{"type":"text","text":"a"}')))),
    "many tools": (CHAT, lambda: raw("tools", many(b'{"type":"function","function":{"name":"f"}}'))),
    "one long prompt": (COMPLETIONS, lambda: body(prompt="the fox " * (BIG // 8))),
    "many prompts": (COMPLETIONS, lambda: raw("prompt", many(b'""'))),
    "many prompts of ids": (COMPLETIONS, lambda: raw("prompt", many(b"[1]"))),
    "a prompt of many ids": (COMPLETIONS, lambda: raw("prompt", many(b"1"))),
    "long system": (MESSAGES, lambda: raw("messages", said(b'"a"') + b',"system":"%b"' % (b"x " * (BIG // 2)))),
    "many inputs": (EMBEDDINGS, lambda: raw("input", many(b'"a"'))),
    "many inputs of ids": (EMBEDDINGS, lambda: raw("input", many(b"[1]"))),
    "long input": (EMBEDDINGS, lambda: body(input="the fox " * (BIG // 8))),
    "many documents": (RERANK, lambda: raw("query", b'"q","documents":%b' % many(b'"a"'))),
    "many texts": (SCORE, lambda: raw("text_1", b'"q","text_2":%b' % many(b'"a"'))),
    "not JSON": (SCORE, lambda: b"\xff" * BIG),
    "spaces": (CHAT, lambda: b" " * BIG),
}


LARGE = ("one long message", "many messages", "many tools", "message of escapes", "wide in a field nobody reads")
DETOURS = ("ruled", "absent")
RULES = [{"name": "code", "keywords": ["python"], "to": NAME}, {"name": "short", "max_prompt_tokens": 200, "to": NAME}]


@pytest.fixture(scope="module")
def gateway(two_replicas: list[Replica]) -> Iterator[RunningGateway]:
    """A gateway in front of a model, of rules that lead to it, and of a model whose only server is not there."""
    pools = {
        NAME: ModelSettings(replicas=[f"http://{replica.host}:{replica.port}" for replica in two_replicas]),
        "ruled": ModelSettings(rules=RULES, default=NAME),
        "absent": ModelSettings(replicas=["http://127.0.0.1:1"], dialect="openai", fallback=[NAME]),
    }
    with running_gateway(pools=pools, waits=False) as found:
        eventually(lambda: found.states()[:2] == ["ready", "ready"])
        yield found


def ask(gateway: RunningGateway, method: str, path: str, content: bytes = b"") -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)) as connection:
        connection.request(method, path, content, {"content-type": "application/json"})
        return connection.getresponse().status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"), [*((NAME, name) for name in CORPUS), *((model, name) for model in DETOURS for name in LARGE)]
)
def test_no_request_holds_up_the_others(gateway: RunningGateway, model: str, name: str) -> None:
    path, build = CORPUS[name]
    content = build().replace(b'"model":"%b",' % NAME.encode(), b'"model":"%b",' % model.encode(), 1)

    def attack() -> int:
        status = ask(gateway, "POST", path, content)
        eventually(gateway.is_idle)
        return status

    assert without_pauses(gateway.loop, attack) < 500


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/" + "x" * 20_000, "/v1/messages/batches?" + "y" * 20_000])
def test_no_path_holds_up_the_others(gateway: RunningGateway, path: str) -> None:
    statuses = without_pauses(gateway.loop, lambda: {ask(gateway, "GET", path) for _ in range(20)})
    assert statuses <= {200, 404}


@pytest.fixture(scope="module")
def seeing_gateway() -> Iterator[RunningGateway]:
    with seeing() as one, running_gateway(one) as found:
        eventually(lambda: found.app.pools[NAME].tokens.prompt_tokenizer is not None)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("hostile", SEEING, ids=str)
def test_no_image_holds_up_the_others(seeing_gateway: RunningGateway, hostile: Hostile) -> None:
    content = hostile.build(NAME)
    assert len(content) <= 8 << 20
    status = without_pauses(seeing_gateway.loop, lambda: ask(seeing_gateway, "POST", hostile.path, content))
    assert status in (200, 400)


def test_lists_are_counted_without_being_built() -> None:
    """Long ones as short ones are."""
    for text in ('["a","b,c","d\\",\\"e"]', "[[1,2],[3]]", "[1,2,3]", '[{"a":[1,2]},{"b":","}]', "[ ]"):
        short = raw("prompt", text.encode())
        long = raw("prompt", text.encode()[:-1] + b" " * (1 << 17) + b"]")
        assert read(short).num_choices == read(long).num_choices
    for one in (b'""', b"[1]", b'"" ', b"[[]]"):
        with pytest.raises(InvalidRequest):
            _ = read(raw("prompt", many(one))).num_choices

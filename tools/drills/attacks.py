"""Requests that no client should send, from a seed: wrong on the wire, wrong in the body. Pure; it sends nothing.

An attack on the wire may be answered, or not; one in the body is a whole request and must be.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


class Attack(NamedTuple):
    name: str
    sent: bytes
    is_whole: bool  # a request that ends: silence is not an answer
    num_pieces: int = 1  # in which it is sent, one after another


def bodies(model: str) -> dict[str, dict[str, Any]]:
    """A good one of each kind, with about every field that there is."""
    message = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    sampling = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "stream": False}
    openai = sampling | {
        "model": model,
        "n": 1,
        "stop": ["never"],
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {"5": 1},
        "user": "somebody",
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 1,
    }
    return {
        CHAT: openai
        | {
            "messages": message,
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 4,
            "prompt_cache_key": "k",
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"a": 1},
            "metadata": {"a": "b"},
            "store": False,
            "stream_options": None,
        },
        COMPLETIONS: openai | {"prompt": "the fox", "logprobs": 2, "echo": False, "best_of": 1, "suffix": None},
        MESSAGES: sampling
        | {
            "model": model,
            "messages": message[1:],
            "system": "be brief",
            "stop_sequences": ["never"],
            "metadata": {"user_id": "u"},
            "top_k": 5,
            "thinking": {"type": "disabled"},
            "tools": [],
        },
    }


# JSON as text: much of it no Python value would become.
VALUES = (
    "null",
    "true",
    "0",
    "-1",
    "1",
    "3",
    "1.5",
    "-0.0",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "4294967296",
    "2147483647",
    "2147483648",
    "1e-400",
    "1" + "0" * 400,
    '""',
    '" "',
    '"x"',
    r'"\u0000"',
    r'"\ud800"',
    r'"\udfff\ud800"',
    r'"a\u0000b\uffff"',
    '"' + "y" * 5000 + '"',
    r'"../../etc/passwd"',
    r'"<|im_start|>system"',
    r'"</s><s>"',
    r'"{{7*7}}{% for x in range(10**9) %}"',
    '"🙂𝔘\u202e"',
    "[]",
    "[[]]",
    "{}",
    "[null]",
    "[1,2]",
    '["a",1]',
    "[-1]",
    "[999999999]",
    '[""]',
    '[" "]',
    '{"a":1}',
    '{"":""}',
    '{"type":"text"}',
    '[{"type":"text","text":"x"}]',
    '[{"role":"user","content":"x"}]',
    '[{"role":"user"}]',
    '[{"role":"assistant","content":[{"type":"text","text":"x"}]}]',
    '[{"role":"🙂","content":"x"}]',
    r'["\ud800"]',
    '{"999999":1}',
    '{"-1":1}',
    '{"5":"x"}',
    '{"include_usage":true}',
    '{"type":"json_object"}',
    "[" * 90 + "]" * 90,
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "[" + "1," * 3000 + "1]",
    '{"type":"json_schema","json_schema":{"name":"x","schema":{"$ref":"#"}}}',
    "tru",
    "'x'",
    "",
    "[1,",
    '"\t"',
    '"\x01"',
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of everything in a JSON value that could be something else."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths_in(inner, (*path, key))


def with_value(body: dict[str, Any], path: tuple[Any, ...], text: str) -> bytes:
    """The body, with this JSON text in that place."""
    body = copy.deepcopy(body)
    place: Any = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@@HERE@@"
    return json.dumps(body).encode().replace(b'"@@HERE@@"', text.encode("utf-8", "surrogatepass"))


def request(path: str, body: bytes, method: str = "POST", headers: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
    )


def body_attacks(model: str, rng: random.Random, count: int) -> Iterator[Attack]:
    good = bodies(model)
    for _ in range(count):
        path = rng.choice(list(good))
        body = good[path] | {"stream": rng.random() < 0.3}
        num_pieces = rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 5, 40))
        match rng.randrange(10):
            case 8:
                data = json.dumps(body | rng.choice(_MULTIPLIED)).encode()
            case 9:
                data = _renamed(body, rng)
            case 0:
                data = _mangled(json.dumps(body).encode(), rng)
            case 1:
                data = rng.choice(_NOT_JSON)
            case 2:
                data = with_value(body | {"surprise": 0}, ("surprise",), rng.choice(VALUES))
            case _:
                place = rng.choice(list(paths_in(body)))
                data = with_value(body, place, rng.choice(VALUES))
                if rng.random() < 0.3 and (again := _json(data)):
                    data = with_value(again, rng.choice(list(paths_in(again))), rng.choice(VALUES))
        sent = request(path, data) if rng.random() < 0.8 else _in_chunks(path, data, rng)
        yield Attack(f"{path} {data[:300]!r}", sent, is_whole=True, num_pieces=num_pieces)


def _in_chunks(path: str, body: bytes, rng: random.Random) -> bytes:
    """The same request in chunks of some size, with trailers that want to be headers."""
    size = rng.choice((1, 2, 7, 4096, max(1, len(body))))
    if len(body) > 20_000:
        size = max(size, 4096)  # the client's own time
    chunks = (body[at : at + size] for at in range(0, len(body), size))
    trailers = rng.choice(
        (b"", b"host: evil\r\n", b"authorization: Bearer x\r\nx-new: y\r\n", b"content-length: 5\r\n")
    )
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n" + trailers + b"\r\n"


# Fields that are small by themselves, and together ask for a great deal.
_MULTIPLIED: tuple[dict[str, Any], ...] = (
    {"n": 128, "max_tokens": 1 << 30},
    {"n": 100_000},
    {"best_of": 1 << 20, "n": 2},
    {"prompt": ["x"] * 5000},
    {"prompt": [[1, 2]] * 3000, "n": 100},
    {"prompt": [1] * 20_000},
    {"prompt": "the fox " * 20_000},
    {"logit_bias": {str(token): 1 for token in range(20_000)}},
    {"stop": [f"stop {number}" for number in range(5000)]},
    {"stop": "a" * 50_000},
    {"stop_sequences": ["a" * 1000] * 1000},
    {"stop_token_ids": list(range(50_000))},
    {"top_logprobs": 1 << 20, "logprobs": 1 << 20},
    {"messages": [{"role": "user", "content": "x"}] * 5000},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]},
    {"tools": [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(2000)]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(range(20_000))}}}},
    {"metadata": {str(number): "x" for number in range(20_000)}},
    {"chat_template_kwargs": {"a": [[0] * 100] * 100}},
    {"min_tokens": 1 << 30, "max_tokens": 1 << 31},
)


def _renamed(body: dict[str, Any], rng: random.Random) -> bytes:
    """The body with a name in it, of a field or of something it asks for, that no program should trust."""
    name = rng.choice(_NAMES)
    if rng.random() < 0.5:
        return with_value(body, (rng.choice([key for key in body if isinstance(body[key], str)] or ["model"]),), name)
    key = rng.choice(list(body))
    text = json.dumps(body).encode()
    return text.replace(json.dumps(key).encode() + b":", name.encode("utf-8", "surrogatepass") + b":", 1)


# As JSON strings, with escapes that a reader may undo too often, or too late.
_NAMES = (
    r'"\u006d\u006f\u0064\u0065\u006c"',  # model
    r'"mod\u0065l"',
    r'"model\u0000"',
    r'"\"model\""',
    r'"\\u006dodel"',
    r'"a\nb\r\nx: y"',
    r'"%s%n{0}{{x}}${x}`x`"',
    r'"\ud83d"',
    r'"\ud83d\ude42"',
    r'"\u202e\u0000\ufeff"',
    '"' + r"\u0041" * 5000 + '"',
    '"' + r"\\" * 20_000 + '"',
    '"' + r"\"" * 20_000 + '"',
    '"' + "n" * 50_000 + '"',
    '"__proto__"',
    '"__class__"',
    '"*"',
    '"small@v1"',
    '"small:"',
    '"../small"',
    '""',
)


_NOT_JSON = (
    b"",
    b" ",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"{}{}",
    b"{}x",
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b"{\x00}",
    b'{"model":"\xff"}',
    b'{"model":"\xed\xa0\x80"}',
    b'{"a":1,"a":2}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b"\x00" * 100,
    b'{"model":' + b'"' + b"z" * 200_000 + b'"}',
    b"a=b&c=d",
)


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data, parse_int=lambda _: 1)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _mangled(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, left out, put in or said twice."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[at : at + rng.randint(1, 20)]
            case 2:
                found[at:at] = rng.choice(
                    (b"\x00", b"\r\n", b"\xff", b"{", b"]", b'"', b":", b" " * 30, b"\xed\xa0\x80")
                )
            case 3:
                found[at:at] = found[max(0, at - 30) : at]
            case _:
                del found[at:]
    return bytes(found)


def wire_attacks(model: str, rng: random.Random, count: int) -> Iterator[Attack]:
    good = [request(path, json.dumps(body).encode()) for path, body in bodies(model).items()]
    for _ in range(count):
        name, sent = rng.choice(_KINDS)(rng.choice(good), rng)
        yield Attack(f"{name} {sent[:300]!r}", sent, is_whole=False, num_pieces=rng.choice((1, 1, 1, 1, 3, 20)))


Made = tuple[str, bytes]


def _mangled_head(good: bytes, rng: random.Random) -> Made:
    head, end, body = good.partition(b"\r\n\r\n")
    return "mangled head", _mangled(head, rng) + end + body


def _mangled_all(good: bytes, rng: random.Random) -> Made:
    return "mangled", _mangled(good, rng)


def _length(good: bytes, rng: random.Random) -> Made:
    _, _, body = good.partition(b"\r\n\r\n")
    length = rng.choice(
        (
            b"-1",
            b"+5",
            b"0x5",
            b"5, 5",
            b"1e3",
            b"",
            b" ",
            b"99999999999999999999999",
            b"18446744073709551617",
            b"9000000",
            b"\xff",
            b"5\r\ncontent-length: 6",
            b"3\r\ntransfer-encoding: chunked",
            b"0",
            b"00000000000000000000000001",
            b"1_0",
        )
    )
    return "length", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %b\r\n\r\n%b" % (
        length,
        body,
    )


def _chunks(good: bytes, rng: random.Random) -> Made:
    _, _, body = good.partition(b"\r\n\r\n")
    cut = rng.randrange(len(body))
    first = rng.choice(
        (
            b"%x" % cut,
            b"-1",
            b"zz",
            b"",
            b"ffffffffffffffffff",
            b"7fffffffffffffff",
            b"%x;a=b" % cut,
            b"%x;" % cut + b"e" * 70_000,
            b"0x%x" % cut,
            b" %x" % cut,
            b"%x\n" % cut,
            b"0",
            b"%x" % (cut + 1),
            b"%x" % max(0, cut - 1),
            b"1_0",
            b"+%x" % cut,
        )
    )
    end = rng.choice(
        (b"0\r\n\r\n", b"0\r\n", b"", b"0\r\nx: y\r\n\r\n", b"0\r\n" + b"x: y\r\n" * 2000 + b"\r\n", b"00000\r\n\r\n")
    )
    coding = rng.choice(
        (b"chunked", b"Chunked", b"gzip, chunked", b"chunked, chunked", b"chunked, gzip", b"xchunked", b"identity")
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: %b\r\n\r\n" % coding
    second = b"%x\r\n" % (len(body) - cut) + body[cut:]
    return "chunks", b"%b%b\r\n%b\r\n%b\r\n%b" % (head, first, body[:cut], second, end)


def _trailers(good: bytes, rng: random.Random) -> Made:
    _, _, body = good.partition(b"\r\n\r\n")
    trailers = rng.choice(
        (
            b"host: evil\r\nauthorization: Bearer psk_x\r\n\r\n",
            b"transfer-encoding: chunked\r\ncontent-length: 7\r\n\r\n",
            b"x: " + b"y" * 200_000 + b"\r\n\r\n",
            b"x" * 200_000 + b": y\r\n\r\n",
            b"x: y\r\n" * 20_000 + b"\r\n",
            b"x: y\r\n" * 20_000,
            b"x: " + b"y" * 200_000,
            b": \r\n\r\n",
            b"no colon\r\n\r\n",
            b"x: \x00\r\n\r\n",
            b"x: y\r\n folded\r\n\r\n",
            b"expect: 100-continue\r\nconnection: upgrade\r\n\r\n",
        )
    )
    extension = rng.choice((b"", b";a=b", b";a" * 40_000))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return "trailers", b"%b%x%b\r\n%b\r\n0\r\n%b" % (head, len(body), extension, body, trailers)


def _hosts(good: bytes, rng: random.Random) -> Made:
    hosts = rng.choice(
        (
            b"",
            b"host: x\r\nhost: y\r\n",
            b"Host: x\r\nhost: x\r\n",
            b"host:\r\n",
            b"host: " + b"x" * 9000 + b"\r\n",
            b"host: x y\r\n",
        )
    )
    return "hosts", good.replace(b"host: x\r\n", hosts, 1)


def _headers(good: bytes, rng: random.Random) -> Made:
    line = rng.choice(
        (
            b"x: y\r\n" * 1200,
            b"x: " + b"y" * 40_000 + b"\r\n",
            b"y" * 40_000 + b": x\r\n",
            b": empty\r\n",
            b"no colon\r\n",
            b"a b: c\r\n",
            b"x: \x00\r\n",
            b"x: \xff\xfe\r\n",
            b" folded: x\r\n",
            b"x: y\r\n folded\r\n",
            b"host: second\r\n",
            b"expect: 100-continue\r\n",
            b"expect: magic\r\n",
            b"connection: upgrade\r\nupgrade: websocket\r\n",
            b"connection: close, keep-alive\r\n",
            b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n",
            b"te: trailers\r\n",
            b"authorization: Bearer \xff\xff\r\n",
            b"authorization: Bearer\r\n",
            b"x-api-key: " + b"k" * 9000 + b"\r\n",
            b"authorization: Basic eDp5\r\n",
            b"content-encoding: gzip\r\n",
            b"x-request-id: a\tb\r\n",
            b"range: bytes=0-\r\n",
            b"x-penstock: envelope\r\n",
            b"x-penstock: stream\r\n",
            b"x-penstock: \xff\r\n",
            b"x-penstock-secret: \xff\r\n",
            b"x-stainless-retry-count: many\r\n",
            b"\r\n",
            b"\n",
            b"x:y\n",
            b"\x0b: x\r\n",
            b"cookie: " + b"a=b; " * 500 + b"\r\n",
        )
    )
    start, _, rest = good.partition(b"\r\n")
    return "header", start + b"\r\n" + line + rest


def _start_line(good: bytes, rng: random.Random) -> Made:
    method = rng.choice(
        (
            b"GET",
            b"HEAD",
            b"OPTIONS",
            b"PUT",
            b"DELETE",
            b"PATCH",
            b"TRACE",
            b"CONNECT",
            b"PRI",
            b"post",
            b"P\x00ST",
            b"",
            b"FOO",
            b"POST",
            b"A" * 500,
            b"M-SEARCH",
            b"PURGE",
            b"QUERY",
        )
    )
    target = rng.choice(
        (
            b"/",
            b"*",
            b"",
            b"//",
            b"/v1/chat/completions/",
            b"/v1/../v1/models",
            b"/v1/models",
            b"/v1/models/%00",
            b"/v1/models/" + b"m" * 9000,
            b"/health",
            b"/ready",
            b"/metrics",
            b"/health/deep",
            b"http://x/v1/models",
            b"/v1/chat/completions?a=b#c",
            b"/\xff\xfe",
            b"/%zz",
            b"/v1/penstock/snapshot",
            b"/v1/penstock/drain/x",
            b"x:443",
            b"/" + b"a" * 40_000,
            b"/v1/messages/count_tokens",
            b"/admin",
            b"/v1\x00",
        )
    )
    version = rng.choice(
        (
            b"HTTP/1.1",
            b"HTTP/1.1",
            b"HTTP/1.0",
            b"HTTP/0.9",
            b"HTTP/2.0",
            b"HTTP/9.9",
            b"HTTP/1.",
            b"HTTX/1.1",
            b"",
            b"HTTP/1.1 ",
        )
    )
    return "start line", method + b" " + target + b" " + version + b"\r\n" + good.partition(b"\r\n")[2]


def _pipelined(good: bytes, rng: random.Random) -> Made:
    parts = [rng.choice((good, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")) for _ in range(rng.randint(2, 12))]
    if rng.random() < 0.5:
        parts.insert(rng.randrange(len(parts)), _mangled(good, rng))
    return "pipelined", b"".join(parts)


def _no_http(good: bytes, rng: random.Random) -> Made:
    return "no HTTP", rng.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
            b"\x00" * 1000,
            b"\r\n" * 5000,
            b"\n",
            b"A" * 100_000,
            b"SSH-2.0-x\r\n",
            b"GET /\r\n",
            bytes(rng.randrange(256) for _ in range(500)),
            b"\xff" * 40_000,
            b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
        )
    )


_KINDS: tuple[Callable[[bytes, random.Random], Made], ...] = (
    _mangled_head,
    _mangled_all,
    _length,
    _chunks,
    _headers,
    _start_line,
    _pipelined,
    _no_http,
    _trailers,
    _hosts,
)

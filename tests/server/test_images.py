"""Images that a server must not take, over real HTTP: each is a 400 that names the part."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.core.settings import ServerSettings
from penstock.http.outside import Outside
from tests.images.samples import data_url, encoded, noise
from tests.server.replica import NAME, Replica, serving
from tests.server.seeing import PLACEHOLDER, seeing
from tests.waiting import GIVE_UP_S, eventually

MOST = 100_000


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    settings = ServerSettings(max_image_bytes=MOST, max_images=3, max_images_bytes=2 * MOST, image_hosts=["*"])
    with seeing(settings, max_tokens=50, image_tokens=0) as found:
        yield found


def png(width: int, height: int) -> str:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
    crcs = [struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks]
    whole = [struct.pack(">I", len(body)) + name + body + crc for (name, body), crc in zip(chunks, crcs, strict=True)]
    return data_url(b"\x89PNG\r\n\x1a\n" + b"".join(whole))


GOOD = data_url(encoded(noise(16, 16)))
HOSTILE = {
    "a bomb": (png(30_000, 30_000), "pixels"),
    "absurd": (png(0x7FFFFFFF, 0x7FFFFFFF), "pixels"),
    "no size": (png(0, 0), "type"),
    "a strip": (data_url(encoded(noise(1000, 2))), "size"),
    "truncated": (data_url(encoded(noise(40, 40), "JPEG")[:400]), "broken"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "type"),
    "html": (data_url(b"<!DOCTYPE html><html></html>"), "type"),
    "bad base64": ("data:image/png;base64,%%%", "base64"),
    "no data": ("data:image/png;base64,", "empty"),
    "too large": (data_url(bytes(MOST + 1)), "bytes"),
    "a file": ("file:///etc/passwd", "url"),
    "a path": ("/etc/passwd", "url"),
    "this machine": ("http://127.0.0.1/", "address"),
    "its metadata": ("http://169.254.169.254/latest/meta-data", "address"),
    "mapped": ("http://[::ffff:127.0.0.1]/", "address"),
    "private": ("https://10.1.2.3/a.png", "address"),
    "other port": ("http://127.0.0.1:8000/", "remote"),
}


def chat(url: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, **more}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_chat_names_the_part_that_is_wrong(replica: Replica, name: str) -> None:
    status, _, answer = replica.post("/v1/chat/completions", **chat(HOSTILE[name][0]))
    assert (status, answer["error"]["code"]) == (400, "invalid_image")
    assert answer["error"]["param"] == "messages[0].content[1].image_url"
    assert answer["error"]["message"].startswith("messages[0].content[1].image_url: ")


@pytest.mark.parametrize("name", ["a bomb", "truncated", "svg", "bad base64", "this machine"])
def test_so_does_every_other_api(replica: Replica, name: str) -> None:
    url = HOSTILE[name][0]
    part = {"type": "input_image", "image_url": url}
    status, _, answer = replica.post("/v1/responses", input=[{"role": "user", "content": [part]}])
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (
        400,
        "invalid_image",
        "input[0].content[0].image_url",
    )
    source = {"type": "url", "url": url}
    content = [{"type": "text", "text": "Look:"}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": content}]
    for path, more in (("/v1/messages", {"max_tokens": 3}), ("/v1/messages/count_tokens", {})):
        status, _, answer = replica.post(path, messages=messages, **more)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"].startswith("messages[0].content[1].source: ")


def test_what_a_result_of_a_tool_shows_is_named_where_it_is(replica: Replica) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%%"}}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    status, _, answer = replica.post("/v1/messages", messages=messages, max_tokens=3)
    assert status == 400
    assert answer["error"]["message"].startswith("messages[2].content[0].content[0].source: is not valid base64")
    items = [
        {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "t",
            "output": [{"type": "input_image", "image_url": "data:;base64,"}],
        },
    ]
    status, _, answer = replica.post("/v1/responses", input=items)
    assert (status, answer["error"]["param"]) == (400, "input[1].output[0].image_url")


def test_how_many_and_how_much(replica: Replica) -> None:
    def code(*urls: str) -> tuple[int, str]:
        content = [{"type": "image_url", "image_url": url} for url in urls]
        status, _, answer = replica.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=3
        )
        return status, answer["error"]["message"]

    assert code(*[GOOD] * 4) == (
        400,
        "messages[0].content[3].image_url: this server takes 3 images in a request, and there are 4",
    )
    large = [data_url(encoded(noise(16, 16, seed)) + bytes(90_000)) for seed in range(3)]
    assert "all images together" in code(*large)[1]
    assert "has 64 tokens; this server takes up to 50" in code(data_url(encoded(noise(64, 64))))[1]
    status, message = code(GOOD)  # the fake engine has no encoder
    assert (status, message) == (400, "this engine takes no images")


def test_a_mark_of_an_image_in_a_text_is_none(replica: Replica) -> None:
    body = chat(GOOD)
    body["messages"][0]["content"][0]["text"] = f"Look {PLACEHOLDER}"
    status, _, answer = replica.post("/v1/chat/completions", **body)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "1 images and 2 places" in answer["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"truncate_prompt_tokens": 5},
        {"prompt_logprobs": 1},
        {"prediction": {"type": "content", "content": [{"type": "image_url", "image_url": GOOD}]}},
    ],
    ids=["truncated", "scored", "expected"],
)
def test_what_cannot_go_with_images_is_refused(replica: Replica, more: dict[str, Any]) -> None:
    status, _, answer = replica.post("/v1/chat/completions", **chat(GOOD, **more))
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"].startswith(next(iter(more)))


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_users_and_tools_show_images(replica: Replica, role: str) -> None:
    content = [{"type": "image_url", "image_url": GOOD}]
    status, _, answer = replica.post("/v1/chat/completions", messages=[{"role": role, "content": content}])
    assert (status, answer["error"]["param"]) == (400, "messages[0].content")


def test_a_context_that_has_no_room_for_the_images(replica: Replica) -> None:
    texts = [{"type": "text", "text": "word " * 4000}, {"type": "image_url", "image_url": GOOD}]
    status, _, answer = replica.post("/v1/chat/completions", messages=[{"role": "user", "content": texts}])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_model_that_takes_no_images_says_so(replica: Replica) -> None:
    with serving() as blind:
        status, _, answer = blind.post("/v1/chat/completions", **chat(GOOD))
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert f"'{NAME}' takes no images" in answer["error"]["message"]
        assert answer["error"]["param"] == "messages[0].content[1].image_url"
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        status, _, answer = blind.post("/v1/messages", messages=[{"role": "user", "content": [image]}], max_tokens=3)
        assert (status, "takes no images" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"type": "base64"},
        {"type": "base64", "data": ""},
        {"type": "url"},
        {"type": "url", "url": "x", "data": "y"},
        {"type": "file", "file_id": "f"},
        "data:,",
    ],
    ids=json.dumps,
)
def test_sources_of_anthropics_that_are_none(replica: Replica, image: Any) -> None:
    content = [{"type": "image", "source": image}]
    status, _, answer = replica.post("/v1/messages", messages=[{"role": "user", "content": content}], max_tokens=3)
    assert status == 400
    assert "messages[0].content[0].source" in answer["error"]["message"]


def test_tokens_of_images_have_no_text(replica: Replica) -> None:
    messages = chat(GOOD)["messages"]
    for path in ("/tokenize", "/v1/chat/completions/render"):
        status, _, answer = replica.post(path, messages=messages)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter"), path


def test_counting_does_not_decode(replica: Replica) -> None:
    """A header is enough: here nothing else is left of the image."""
    data = base64.b64encode(encoded(noise(48, 40))[:60]).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    texts = [
        replica.post("/v1/messages/count_tokens", messages=[{"role": "user", "content": content}])[2]["input_tokens"]
        for content in ([{"type": "text", "text": PLACEHOLDER}], [image])
    ]
    assert texts[1] - texts[0] == 6 * 5 - 1


def test_decoded_images_have_a_budget_that_their_requests_give_back() -> None:
    settings = ServerSettings(max_image_gib=150_000 / (1 << 30))
    small, large = data_url(encoded(noise(64, 64))), data_url(encoded(noise(128, 128)))  # 98 kB and four times that
    with seeing(settings, step_s=0.001) as replica:
        status, _, answer = replica.post("/v1/chat/completions", **chat(large))
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1].image_url")
        assert "max_image_gib" in answer["error"]["message"]
        status, _, answer = replica.post("/v1/chat/completions", **chat(small, n=2))
        assert status == 400
        with replica.engine_paused(), ThreadPoolExecutor(1) as threads:
            first = threads.submit(replica.post, "/v1/chat/completions", **chat(small))
            eventually(lambda: replica.engine.num_open == 1)
            status, headers, answer = replica.post("/v1/chat/completions", **chat(small))
            assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
            os.kill(replica.processes[-1].pid, signal.SIGCONT)
            assert first.result()[0] == 200
        assert eventually(lambda: replica.post("/v1/chat/completions", **chat(small))[0] == 200)


def test_the_same_image_twice_is_the_same_answer() -> None:
    with seeing() as replica:
        told = [replica.post("/v1/chat/completions", **chat(GOOD, temperature=0))[2] for _ in range(2)]
        assert told[0]["choices"] == told[1]["choices"]
        assert told[1]["usage"]["prompt_tokens_details"]["image_tokens"] == 4
        metrics = replica.final_metrics()
        assert metrics[f"penstock_images_total{{{NAME}}}"] == 2
        assert metrics[f"penstock_image_tokens_total{{{NAME}}}"] == 8
        assert replica.is_idle()


def test_a_conversation_that_is_too_long_may_lose_an_image() -> None:
    image = {"type": "input_image", "image_url": data_url(encoded(noise(160, 144)))}
    items = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "word " * 60}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [image | {"image_url": GOOD}, {"type": "input_text", "text": "word " * 60}]},
    ]
    with seeing(num_blocks=128) as replica:  # a context of 512 tokens
        status, _, answer = replica.post("/v1/responses", input=items, truncation="auto", max_output_tokens=5)
        assert status == 200
        assert answer["usage"]["input_tokens_details"]["image_tokens"] == 4
        status, _, answer = replica.post("/v1/responses", input=items, max_output_tokens=5)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


class _OneImage(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = b"<html>" if self.path == "/page.png" else encoded(noise(16, 16))
        self.send_response(200 if self.path.endswith(".png") else 404)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def one_image() -> Iterator[tuple[str, Outside]]:
    """The address of a web server that has an image, and what may fetch from it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OneImage) as files, ThreadPoolExecutor(1) as threads:
        threads.submit(files.serve_forever)
        try:
            place = f"127.0.0.1:{files.server_port}"
            yield f"http://{place}", Outside([place], MOST, GIVE_UP_S, is_allowed=lambda address: True)
        finally:
            files.shutdown()


def test_an_image_that_is_fetched_is_the_same_as_one_that_is_sent() -> None:
    with one_image() as (place, outside), seeing(outside=outside) as replica:
        sent = replica.post("/v1/chat/completions", **chat(GOOD, temperature=0))[2]
        fetched = replica.post("/v1/chat/completions", **chat(f"{place}/a.png", temperature=0))[2]
        assert fetched["choices"] == sent["choices"]
        assert fetched["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        for path, problem in (("/page.png", "no image of a kind"), ("/gone", "answers 404")):
            status, _, answer = replica.post("/v1/chat/completions", **chat(place + path))
            assert (status, answer["error"]["code"]) == (400, "invalid_image")
            assert problem in answer["error"]["message"]


def test_bytes_that_were_fetched_have_the_same_budget() -> None:
    pixels, fetched = 16 * 16 * 3 * 2 * 4, len(encoded(noise(16, 16)))  # an image is two frames of floats
    with one_image() as (place, outside):

        def asked(url: str) -> int:
            return replica.post("/v1/chat/completions", **chat(url))[0]

        with seeing(ServerSettings(max_image_gib=(pixels + fetched - 1) / (1 << 30)), outside=outside) as replica:
            assert asked(f"{place}/a.png") == 429
            assert eventually(lambda: asked(GOOD) == 200), "what was refused gives back what it had"
        with seeing(ServerSettings(max_image_gib=(pixels + fetched) / (1 << 30)), outside=outside) as replica:
            for _ in range(2):
                assert eventually(lambda: asked(f"{place}/a.png") == 200)

"""Requests with images that are within every limit, and cost a careless server much."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from tests.hostile import CHAT, COUNT_TOKENS, MAX_BODY_BYTES, MESSAGES, RESPONSES, Hostile
from tests.images.samples import data_url, encoded, noise


def _png(width: int, height: int) -> bytes:
    """All of it, in one colour."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height), 9)
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    whole = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + whole


def _chat(name: str, content: Any) -> Hostile:
    def build(model: str) -> bytes:
        parts = content() if callable(content) else content
        body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        return json.dumps(body).encode()

    return Hostile(f"chat: {name}", CHAT, build)


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _large() -> str:
    return data_url(encoded(noise(1300, 1300).effect_spread(40), compress_level=1))


def _messages(model: str, more: dict[str, Any] = {"max_tokens": 1}) -> bytes:  # noqa: B006 (not changed)
    source = {"type": "base64", "media_type": "image/png", "data": _large().partition(",")[2]}
    content = [{"type": "image", "source": source}]
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


def _responses(model: str) -> bytes:
    part = {"type": "input_image", "image_url": _large()}
    return json.dumps({"model": model, "input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}).encode()


_EMPTY = "data:;base64,"
SEEING = [
    _chat("megabytes of an image", lambda: [_image(_large())]),
    _chat("fifty megapixels of nothing", lambda: [_image(data_url(_png(7000, 7000)))]),
    _chat("a bomb", lambda: [_image(data_url(_png(20_000, 10_000)))]),
    _chat("megabytes of base64 that is none", lambda: [_image(_EMPTY + "*" * (MAX_BODY_BYTES - 1000))]),
    _chat("megabytes of zeros", lambda: [_image(_EMPTY + "A" * (MAX_BODY_BYTES - 1000))]),
    _chat("megabytes of escapes", lambda: [_image(_EMPTY + "%41" * (MAX_BODY_BYTES // 3 - 1000))]),
    _chat("sixteen images", lambda: [_image(data_url(encoded(noise(160, 144, seed)))) for seed in range(16)]),
    _chat("twenty thousand images", lambda: [_image("x")] * 20_000),
    _chat("a million marks", lambda: [{"type": "text", "text": "<think>" * 1_000_000}, _image(data_url(_png(9, 9)))]),
    Hostile("messages: megabytes of an image", MESSAGES, _messages),
    Hostile(
        "count_tokens: megabytes of an image",
        COUNT_TOKENS,
        lambda model: _messages(model).replace(b', "max_tokens": 1', b""),
    ),
    Hostile("responses: megabytes of an image", RESPONSES, _responses),
]

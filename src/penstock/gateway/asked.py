"""What the door must know of a request's body, and nothing else: the rest is for the replica to read.

Sizes are bounds, not counts: a token is at least one byte, and what a chat template adds around a message is less than
the JSON around it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.api.errors import ANTHROPIC, OPENAI, Convention
from penstock.core.errors import InvalidRequest

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Asked(msgspec.Struct, frozen=True, gc=False):
    model: str
    stream: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    @property
    def output_limit(self) -> int | None:
        """Of one choice, if the client set one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def session(self) -> str | None:
        """Requests that should meet the same cache."""
        return self.prompt_cache_key or self.user


class Surface(msgspec.Struct, frozen=True):
    """One of the paths that generate: which clients speak it, and what they mean by saying nothing."""

    path: bytes
    convention: Convention
    default_output: int | None  # tokens, if the client sets no limit; None: as many as the context leaves


SURFACES = {
    surface.path: surface
    for surface in (
        Surface(b"/v1/chat/completions", OPENAI, None),
        Surface(b"/v1/completions", OPENAI, 16),
        Surface(b"/v1/messages", ANTHROPIC, None),
    )
}

_decoder = msgspec.json.Decoder(Asked)


def read(body: bytes) -> Asked:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.rpartition("$.")[2].rstrip("`") if "$." in text else None
        raise InvalidRequest(text, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def with_model(body: bytes, model: str) -> bytes:
    """The client's request for a model that is known to its replicas by another name; nothing else is read."""
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(members | {"model": msgspec.Raw(msgspec.json.encode(model))})


def with_output_limit(body: bytes, limit: int) -> bytes:
    """The client's bytes with a limit where it set none. It goes first: every object has a first brace."""
    start = body.index(b"{") + 1
    comma = b"" if body[start:].lstrip()[:1] == b"}" else b","
    return b'%b"max_tokens":%d%b%b' % (body[:start], limit, comma, body[start:])

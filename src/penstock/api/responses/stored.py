"""The parts of requests and responses that a store of them reads and writes: which state a request asks for, its
input as items that can be listed, the request without that state, and pages of items. JSON in, JSON out; it knows no
store.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from penstock.api.decoding import explain
from penstock.api.responses.objects import Object, encode
from penstock.api.responses.request import MAX_ID, Kept
from penstock.core.errors import BodyTooLarge, InvalidRequest

MAX_BYTES = 8 << 20  # of a conversation that is put before a request's input, and of both, unless bodies may have more
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_STATEFUL = ("previous_response_id", "store", "background", "kept")
_MAX_PAGE = 100
_PAGE = 20
_MAX_DIGITS = 9


class StateAsked(msgspec.Struct, frozen=True):
    """Members of a request that ask for state, and its input."""

    model: str = ""
    input: msgspec.Raw = msgspec.Raw(b'""')
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None

    @property
    def is_stored(self) -> bool:
        """A response is kept unless its client says otherwise, as OpenAI has it."""
        return self.store is not False

    @property
    def needs_store(self) -> str | None:
        """The member that cannot be had without a store."""
        return next((name for name in ("previous_response_id", "background", "store") if getattr(self, name)), None)


_asked = msgspec.json.Decoder(StateAsked)
_inputs = msgspec.json.Decoder(str | list[dict[str, Any]])
_items = msgspec.json.Decoder(list[dict[str, Any]])
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, Any])


def read_state(body: bytes) -> StateAsked:
    """Raises InvalidRequest. Errors in the other fields are for others to report."""
    try:
        asked = _asked.decode(body)
    except msgspec.ValidationError as error:
        raise explain(error, StateAsked) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if len(asked.previous_response_id or "") > MAX_ID:
        problem = f"previous_response_id: must have at most {MAX_ID} characters"
        raise InvalidRequest(problem, param="previous_response_id")
    return asked


def input_items(given: msgspec.Raw) -> list[Object]:
    """A request's own input as items that have ids."""
    try:
        found = _inputs.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("input: expected a string or a list of items", param="input") from None
    if isinstance(found, str):
        found = [{"role": "user", "content": found}] if found else []
    return [_listed(item) for item in found]


def _listed(item: Object) -> Object:
    kind = item.get("type") or "message"
    found = item | {"type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"}
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        annotations: Object = {"annotations": []} if part == "output_text" else {}
        found["content"] = [{"type": part, "text": content, **annotations}]
    return found | ({"status": "completed"} if item.get("status") is None and kind != "reasoning" else {})


class Turn(NamedTuple):
    """A response that was kept: its input items and itself, as JSON."""

    input: str
    response: str


def with_conversation(
    body: bytes, turns: Iterable[Turn], items: Sequence[Object], kept: Kept, max_bytes: int = MAX_BYTES
) -> bytes:
    """The request with all items of a conversation as its input, and without what was done for it."""
    before: list[Object] = []
    num_bytes = 0
    for turn in turns:
        num_bytes += len(turn.input) + len(turn.response)
        before += _items.decode(turn.input)
        before += _object.decode(turn.response).get("output", ())
        if num_bytes > max_bytes:
            problem = f"previous_response_id: the conversation has more than {max_bytes} bytes"
            raise InvalidRequest(problem, param="previous_response_id")
    members = {name: value for name, value in _members.decode(body).items() if name not in _STATEFUL}
    written = encode(members | {"input": [*before, *items], "kept": kept})
    if len(written) > max_bytes:
        raise BodyTooLarge(f"with its conversation and ids of its items the body has more than {max_bytes} bytes")
    return written


def without_stream(body: bytes) -> bytes:
    members = _members.decode(body)
    return encode({name: value for name, value in members.items() if name not in ("stream", "stream_options")})


def patched(response: bytes | str, **members: object) -> bytes:
    """A response object with some members changed."""
    return encode(_object.decode(response) | members)


def read_response(data: bytes) -> Object | None:
    """A response object; None: this is none."""
    try:
        found = _object.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.get("object") == "response" and isinstance(found.get("id"), str) else None


def item_page(items: str, query: bytes) -> bytes:
    """A page of a response's input items, as the query asks for it. Raises InvalidRequest."""
    asked = dict(parse_qsl(query.decode(errors="replace")))
    limit, order = asked.get("limit", str(_PAGE)), asked.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MAX_PAGE:
        raise InvalidRequest(f"limit: expected a number from 1 to {_MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: expected 'asc' or 'desc'", param="order")
    found = _items.decode(items)
    if order == "desc":
        found.reverse()
    if (after := asked.get("after")) is not None:
        at = next((at for at, item in enumerate(found) if item["id"] == after), None)
        if at is None:
            raise InvalidRequest("after: the response has no such input item", param="after")
        found = found[at + 1 :]
    page = found[: int(limit)]
    return encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(found),
        }
    )


def streams_after(query: bytes) -> int | None:
    """The number of the last event that a reader of a response's stream has, -1 if it has none; None: it asks for the
    response as a whole. Raises InvalidRequest."""
    asked: Mapping[str, str] = dict(parse_qsl(query.decode(errors="replace")))
    stream, after = asked.get("stream", "false").lower(), asked.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream: expected true or false", param="stream")
    if stream == "false":
        if after is not None:
            raise InvalidRequest("starting_after: it goes with stream=true", param="starting_after")
        return None
    if after is None:
        return -1
    if not after.isascii() or not after.isdigit() or len(after) > _MAX_DIGITS:
        raise InvalidRequest("starting_after: expected the number of an event", param="starting_after")
    return int(after)

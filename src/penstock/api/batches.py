"""Wire formats of batches: what clients ask for, the rows of their files, and the rows of results.

Two APIs, one idea: OpenAI's rows are lines of a file that was uploaded, Anthropic's are members of one body. A row is
read into `BatchRow`, and its end is written by the API's `RowWriter`. Nothing here knows how rows are run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from penstock.api.decoding import WireStruct, decode
from penstock.core.config import shown
from penstock.core.errors import InvalidRequest, UnsupportedParameter

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MESSAGES = "/v1/messages"
MAX_WINDOW_H = 7 * 24
_MAX_ID = 512  # characters of a custom_id
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]


class ExpiresAfter(WireStruct):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2592000)]


class BatchCreate(WireStruct):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> float:
        return 3600.0 * int(self.completion_window[:-1])


def read_batch(body: bytes) -> BatchCreate:
    asked = decode(_create, body)
    if asked.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint: expected one of {', '.join(ENDPOINTS)}", param="endpoint")
    window = _WINDOW.fullmatch(asked.completion_window)
    if window is None or int(window[1]) > MAX_WINDOW_H:
        raise InvalidRequest(f"completion_window: expected hours, 1h to {MAX_WINDOW_H}h", param="completion_window")
    if not asked.input_file_id.isprintable():
        raise InvalidRequest("input_file_id: that is no name of a file", param="input_file_id")
    return asked


# -- rows


class RowProblem(Exception):
    """An error in a row, told with its line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class BatchRow(NamedTuple):
    line: int  # from 1 on
    custom_id: str
    model: str
    body: bytes


class _OpenAIRow(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=_MAX_ID)]
    method: str
    url: str
    body: msgspec.Raw


class _AnthropicRow(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    params: msgspec.Raw


class _Body(msgspec.Struct):
    """Members of a row's request that are looked at before it is run."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    background: bool | None = None


def read_row(line: int, text: bytes, endpoint: str) -> BatchRow:
    """Raises RowProblem."""
    is_messages = endpoint == MESSAGES
    try:
        if is_messages:
            message = _anthropic_row.decode(text)
            custom_id, raw = message.custom_id, bytes(message.params)
        else:
            row = _openai_row.decode(text)
            custom_id, raw = row.custom_id, bytes(row.body)
            if row.method != "POST":
                raise RowProblem("invalid_method", "method: expected POST", "method")
            if row.url != endpoint:
                problem = f"url: expected {endpoint}, the endpoint of the batch, and not '{shown(row.url)}'"
                raise RowProblem("mismatched_endpoint", problem, "url")
    except msgspec.ValidationError as error:
        raise RowProblem("invalid_request", f"the row is not as it should be: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowProblem("invalid_json_line", f"this line is not valid JSON: {error}") from None
    name = "params" if is_messages else "body"
    try:
        body = _body.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowProblem("invalid_request", f"{name}: {error}", name) from None
    if body.stream:
        raise RowProblem("unsupported_parameter", f"{name}.stream: results of batches are told as a whole", "stream")
    if body.background:
        raise RowProblem("unsupported_parameter", f"{name}.background: a batch is in the background", "background")
    return BatchRow(line, custom_id, body.model, raw)


class RowWriter(Protocol):
    """Writer of an API's results: a row's end, as a line of a file."""

    has_error_file: bool

    def answered(self, row: BatchRow, row_id: str, request_id: str, status: int, body: bytes) -> bytes: ...
    def not_run(self, row: BatchRow, row_id: str, outcome: Literal["cancelled", "expired"]) -> bytes: ...


class OpenAIRows:
    has_error_file = True

    def answered(self, row: BatchRow, row_id: str, request_id: str, status: int, body: bytes) -> bytes:
        response = {"status_code": status, "request_id": request_id, "body": _json(body)}
        return _line({"id": row_id, "custom_id": row.custom_id, "response": response, "error": None})

    def not_run(self, row: BatchRow, row_id: str, outcome: Literal["cancelled", "expired"]) -> bytes:
        why = "before the completion window expired" if outcome == "expired" else "before the batch was cancelled"
        error = {"code": f"batch_{outcome}", "message": f"This request could not be executed {why}."}
        return _line({"id": row_id, "custom_id": row.custom_id, "response": None, "error": error})


class AnthropicRows:
    has_error_file = False

    def answered(self, row: BatchRow, row_id: str, request_id: str, status: int, body: bytes) -> bytes:
        if status == 200:
            return _line({"custom_id": row.custom_id, "result": {"type": "succeeded", "message": _json(body)}})
        return _line({"custom_id": row.custom_id, "result": {"type": "errored", "error": _json(body)}})

    def not_run(self, row: BatchRow, row_id: str, outcome: Literal["cancelled", "expired"]) -> bytes:
        kind = "canceled" if outcome == "cancelled" else outcome
        return _line({"custom_id": row.custom_id, "result": {"type": kind}})


# -- pages of lists


class Page(NamedTuple):
    limit: int
    after: str | None
    is_descending: bool
    purpose: str | None


def read_page(asked: Sequence[tuple[str, str]], *, after: str, most: int, usual: int, takes: Sequence[str]) -> Page:
    """`after`: the parameter that says where the page begins; `takes`: others that there are, of `order`, `purpose`."""
    found = dict(asked)
    for name in found.keys() - {"limit", after, *takes}:
        raise UnsupportedParameter(f"{shown(name)}: this list has no such parameter", param=shown(name))
    limit, order = found.get("limit", str(usual)), found.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= most:
        raise InvalidRequest(f"limit: expected a number from 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: expected 'asc' or 'desc'", param="order")
    for name in (after, "purpose"):
        if not found.get(name, "").isprintable() or len(found.get(name, "")) > 128:
            raise InvalidRequest(f"{name}: there is no such thing", param=name)
    return Page(int(limit), found.get(after), order == "desc", found.get("purpose"))


def _line(value: dict[str, Any]) -> bytes:
    return encode(value) + b"\n"


def _json(body: bytes) -> Any:
    """An answer as a value; one that is no JSON, as of other servers, as a text."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace")
    return msgspec.Raw(body.replace(b"\n", b" ").replace(b"\r", b" "))


encode: Callable[[Any], bytes] = msgspec.json.encode
_create = msgspec.json.Decoder(BatchCreate)
_openai_row = msgspec.json.Decoder(_OpenAIRow)
_anthropic_row = msgspec.json.Decoder(_AnthropicRow)
_body = msgspec.json.Decoder(_Body)

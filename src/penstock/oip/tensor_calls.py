"""Models that take tensors, behind the protocol: what a replica computes itself, and a gateway passes on.

The body of an inference is HTTP's with the binary extension, whatever it came over: JSON, and after it the bytes of
tensors. So a gateway reads none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from penstock.api.oip.infer_json import HEADER_LENGTH
from penstock.core.errors import InvalidRequest
from penstock.http.message import JSON, render
from penstock.oip.inner_exchange import Caller


class TensorBody(NamedTuple):
    """Body of a request or an answer."""

    data: bytes
    json_length: int | None = None  # None: no bytes come after the JSON
    headers: Mapping[bytes, bytes] = {}  # of an answer, that a client may want to see


class TensorCalls(Protocol):
    """Each call raises Refusal or PenstockError."""

    def owns(self, model: str) -> bool:
        """Whether this is a model that takes tensors. One that nobody knows is none."""

    async def infer(self, caller: Caller, model: str, version: str, body: TensorBody) -> TensorBody: ...

    async def is_ready(self, caller: Caller, model: str, version: str) -> bool: ...

    async def metadata(self, caller: Caller, model: str, version: str) -> dict[str, Any]: ...

    async def config(self, caller: Caller, model: str, version: str) -> dict[str, Any]: ...

    async def statistics(self, caller: Caller, model: str, version: str) -> dict[str, Any]: ...


class RepositoryCalls(Protocol):
    """The models of a server that come and go by call. Each raises Refusal or PenstockError."""

    async def index(self, caller: Caller, *, only_ready: bool) -> list[dict[str, Any]]:
        """Name, version, state and reason of each."""

    async def load(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None: ...

    async def unload(self, caller: Caller, model: str, parameters: Mapping[str, object]) -> None: ...


def json_length(headers: Mapping[bytes, bytes], num_bytes: int) -> int | None:
    """Length of the JSON in a body, as the header says. Raises InvalidRequest."""
    told = headers.get(HEADER_LENGTH)
    if told is None:
        return None
    if not told.isdigit() or len(told) > 12 or int(told) > num_bytes:
        name = HEADER_LENGTH.decode()
        raise InvalidRequest(f"{name} is not a length within the body, which has {num_bytes} bytes", param=name)
    return int(told)


def header_lines(body: TensorBody) -> bytes:
    """Header lines of an answer over HTTP."""
    if body.json_length is None:
        return JSON + render(body.headers.items())
    own = [(b"content-type", b"application/octet-stream"), (HEADER_LENGTH, b"%d" % body.json_length)]
    return render([*own, *body.headers.items()])

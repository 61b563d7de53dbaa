"""The one table from error to HTTP status and OpenAI error type. Codes come from the error classes themselves.

It knows nothing of sockets: `api/asgi.py` sends what is built here, and `api/sse.py` frames it in mid-stream.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from penstock.core import errors
from penstock.core.errors import PenstockError


class HttpError(NamedTuple):
    status: int
    type: str  # what OpenAI's clients show as `error.type`


STATUS_TABLE: dict[type[PenstockError], HttpError] = {
    errors.PenstockError: HttpError(500, "server_error"),
    errors.InvalidRequest: HttpError(400, "invalid_request_error"),
    errors.ContextLengthExceeded: HttpError(400, "invalid_request_error"),
    errors.UnsupportedParameter: HttpError(400, "invalid_request_error"),
    errors.BodyTooLarge: HttpError(413, "invalid_request_error"),
    errors.NotFound: HttpError(404, "not_found_error"),
    errors.ModelNotFound: HttpError(404, "not_found_error"),
    errors.MethodNotAllowed: HttpError(405, "invalid_request_error"),
    errors.Overloaded: HttpError(429, "rate_limit_error"),
    errors.EngineUnavailable: HttpError(503, "server_error"),
    errors.EngineFailed: HttpError(500, "server_error"),
    errors.RequestAborted: HttpError(503, "server_error"),  # seen by a client only when the server is stopping
    errors.ModelError: HttpError(500, "server_error"),
    errors.ModelMissing: HttpError(500, "server_error"),
    errors.ModelCorrupt: HttpError(500, "server_error"),
    errors.ModelUnsupported: HttpError(500, "server_error"),
    errors.ConfigError: HttpError(500, "server_error"),
}

_RETRYABLE = (429, 503)
_DEFAULT_RETRY_AFTER_S = 1.0


def http_error(error: PenstockError) -> HttpError:
    """The row of the error's class, or of the nearest class above it that has one."""
    return next(STATUS_TABLE[cls] for cls in type(error).__mro__ if cls in STATUS_TABLE)


def error_body(error: PenstockError) -> bytes:
    body = {
        "message": error.message,
        "type": http_error(error).type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": body})


def error_headers(error: PenstockError) -> list[tuple[bytes, bytes]]:
    """Retry-After where trying again can help: whole seconds, rounded up so that nobody comes too early."""
    if http_error(error).status not in _RETRYABLE:
        return []
    wait_s = _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return [(b"retry-after", b"%d" % max(1, math.ceil(wait_s)))]

"""The one table from error to HTTP status and error type, and the two shapes in which clients read it.

Codes come from the error classes themselves. It knows nothing of sockets: `api/asgi.py` sends what is built here, and
`api/sse.py` frames it in mid-stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.core import errors
from penstock.core.errors import PenstockError


class HttpError(NamedTuple):
    status: int
    type: str  # what OpenAI's clients show as `error.type`
    anthropic_status: int | None = None  # where Anthropic has a status of its own


STATUS_TABLE: dict[type[PenstockError], HttpError] = {
    errors.PenstockError: HttpError(500, "server_error"),
    errors.InvalidRequest: HttpError(400, "invalid_request_error"),
    errors.ContextLengthExceeded: HttpError(400, "invalid_request_error"),
    errors.InvalidImage: HttpError(400, "invalid_request_error"),
    errors.InvalidValue: HttpError(422, "invalid_request_error"),
    errors.PreviousResponseNotFound: HttpError(400, "invalid_request_error"),
    errors.RequestQuarantined: HttpError(422, "invalid_request_error"),
    errors.StorageQuotaExceeded: HttpError(400, "invalid_request_error"),
    errors.TooLargeForLimit: HttpError(400, "invalid_request_error"),
    errors.UnsupportedParameter: HttpError(400, "invalid_request_error"),
    errors.UnsupportedTask: HttpError(400, "invalid_request_error"),
    errors.ThreadUnsupported: HttpError(400, "invalid_request_error"),
    errors.BodyTooLarge: HttpError(413, "invalid_request_error"),
    errors.HeadersTooLarge: HttpError(431, "invalid_request_error"),
    errors.UpgradeRequired: HttpError(426, "invalid_request_error"),
    errors.RequestTimeout: HttpError(408, "invalid_request_error"),
    errors.Unauthenticated: HttpError(401, "authentication_error"),
    errors.PermissionDenied: HttpError(403, "permission_error"),
    errors.Conflict: HttpError(409, "invalid_request_error"),
    errors.NotFound: HttpError(404, "not_found_error"),
    errors.ModelNotFound: HttpError(404, "not_found_error"),
    errors.TenantNotFound: HttpError(404, "not_found_error"),
    errors.KeyNotFound: HttpError(404, "not_found_error"),
    errors.ReplicaNotFound: HttpError(404, "not_found_error"),
    errors.ResponseNotFound: HttpError(404, "not_found_error"),
    errors.FileNotFound: HttpError(404, "not_found_error"),
    errors.BatchNotFound: HttpError(404, "not_found_error"),
    errors.RolloutNotFound: HttpError(404, "not_found_error"),
    errors.MethodNotAllowed: HttpError(405, "invalid_request_error"),
    errors.Overloaded: HttpError(429, "rate_limit_error", anthropic_status=529),
    errors.RateLimited: HttpError(429, "rate_limit_error"),
    errors.BudgetExhausted: HttpError(429, "insufficient_quota", anthropic_status=402),
    errors.BuffersFull: HttpError(503, "server_error", anthropic_status=529),
    errors.StoreUnavailable: HttpError(503, "server_error"),
    errors.StoreCorrupt: HttpError(500, "server_error"),
    errors.LeaseLost: HttpError(409, "invalid_request_error"),
    errors.PoolTaken: HttpError(409, "invalid_request_error"),
    errors.CapacityRefused: HttpError(503, "server_error"),
    errors.OrchestratorError: HttpError(503, "server_error"),
    errors.EngineUnavailable: HttpError(503, "server_error"),
    errors.EngineFailed: HttpError(500, "server_error"),
    errors.RequestAborted: HttpError(503, "server_error"),  # seen by a client only when the server is stopping
    errors.StepFailed: HttpError(502, "server_error"),
    errors.StepTimeout: HttpError(504, "server_error"),
    errors.ModelError: HttpError(500, "server_error"),
    errors.ModelMissing: HttpError(500, "server_error"),
    errors.ModelCorrupt: HttpError(500, "server_error"),
    errors.ModelUnsupported: HttpError(500, "server_error"),
    errors.ConfigError: HttpError(500, "server_error"),
}

# Anthropic's error types follow from the status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
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
    if error.reason is not None:
        body["reason"] = error.reason
    return msgspec.json.encode({"error": body})


def error_headers(error: PenstockError) -> list[tuple[bytes, bytes]]:
    """Retry-After where trying again can help: whole seconds, rounded up so that nobody comes too early."""
    if http_error(error).status not in _RETRYABLE:
        return []
    wait_s = _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return [(b"retry-after", b"%d" % max(1, math.ceil(wait_s)))]


def anthropic_status(error: PenstockError) -> int:
    row = http_error(error)
    return row.status if row.anthropic_status is None else row.anthropic_status


def anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def anthropic_error_body(error: PenstockError, request_id: str) -> bytes:
    body = {
        "type": anthropic_type(anthropic_status(error)),
        "message": error.message,
        "details": {"error_code": error.code, "param": error.param, "reason": error.reason},
    }
    return msgspec.json.encode({"type": "error", "error": body, "request_id": request_id})


def plain_error_body(message: str, code: str = "", param: str | None = None, reason: str | None = None) -> bytes:
    """Clients of the Open Inference Protocol read a text as the error. Our own fields stand beside it."""
    beside = {"code": code or None, "param": param, "reason": reason}
    return msgspec.json.encode({"error": message, **{name: value for name, value in beside.items() if value}})


class Convention(NamedTuple):
    """Errors as a family of clients expects them, and the headers in which it looks for the request's id."""

    status: Callable[[PenstockError], int]
    body: Callable[[PenstockError, str], bytes]  # of an error and the request's id
    event_name: bytes | None  # of an error in mid-stream
    id_headers: tuple[bytes, ...] = (b"x-request-id",)


OPENAI = Convention(
    status=lambda error: http_error(error).status, body=lambda error, _: error_body(error), event_name=None
)
ANTHROPIC = Convention(
    anthropic_status, anthropic_error_body, event_name=b"error", id_headers=(b"x-request-id", b"request-id")
)

OPEN_INFERENCE = Convention(
    status=lambda error: http_error(error).status,
    body=lambda error, _: plain_error_body(error.message, error.code, error.param, error.reason),
    event_name=None,
)


def convention_at(target: bytes) -> Convention:
    """The convention of those who ask for this path, for errors of which no handler knows."""
    if target.startswith((b"/v2/models/", b"/v2/health/")):
        return OPEN_INFERENCE
    return ANTHROPIC if target.startswith(b"/v1/messages") else OPENAI

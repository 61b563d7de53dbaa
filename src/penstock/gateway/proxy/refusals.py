"""Refusals: the limiter's and the admission's reasons as typed errors, and how a client is told an error."""

from __future__ import annotations

import math
from typing import Protocol

from penstock.admission.decision import Shed, ShedReason
from penstock.api.errors import Convention, error_headers
from penstock.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    Overloaded,
    PenstockError,
    RateLimited,
    TooLargeForLimit,
)
from penstock.gateway.tokens.request_size import Size
from penstock.http.exchange import Sink
from penstock.http.message import JSON, render
from penstock.router.filters import ADAPTER, CONTEXT
from penstock.tenancy.limits.quota import Reason, Refusal


class Reserved(Protocol):
    """The reservation of a request, and its purpose (`sizes`)."""

    exact: int | None
    most: int

    @property
    def reserved(self) -> int: ...


def respond(sink: Sink, convention: Convention, error: PenstockError, request_id: str) -> None:
    """Writes an error as the whole answer."""
    named = ((name, request_id.encode()) for name in convention.id_headers)
    headers, body = JSON + render([*error_headers(error), *named]), convention.body(error, request_id)
    sink.start(convention.status(error), headers, length=len(body), data=body, is_last=True)


def limited(refusal: Refusal, size: Reserved) -> PenstockError:
    if refusal.reason is Reason.TOO_LARGE:
        prompt = f"{size.exact} tokens" if size.exact is not None else f"up to {size.most} tokens"
        return TooLargeForLimit(
            f"with a prompt of {prompt} and its output limit this request needs {size.reserved} tokens, more than this "
            f"tenant's whole limit of {refusal.limit} tokens per minute",
            reason=refusal.reason.value,
        )
    return RateLimited(
        f"{refusal.reason.value}: {_shortage(refusal, size)}{_time(refusal)}",
        reason=refusal.reason.value,
        retry_after_s=refusal.retry_after_s,
    )


def _shortage(refusal: Refusal, size: Reserved) -> str:
    if refusal.reason is Reason.CONCURRENCY:
        return f"{refusal.used} of {refusal.limit} requests of this tenant are open"
    if refusal.reason not in (Reason.REQUESTS, Reason.TOKENS):
        return "this tenant's limits cannot be checked now"
    is_tokens = refusal.reason is Reason.TOKENS
    need = size.reserved if is_tokens else 1
    what = f"{refusal.used} of {refusal.limit} {'tokens' if is_tokens else 'requests'} are used in the last 60 seconds"
    if is_tokens:
        what += f", and this request needs {need}"
    if refusal.is_paced:
        what += "; this limit is smooth, and gives out a sixth at once"
    elif refusal.used + need <= refusal.limit:
        what += f"; {refusal.kept} are kept for requests that were told to come back"
    return what


def _time(refusal: Refusal) -> str:
    """The time of the Retry-After header, in words."""
    return "" if refusal.retry_after_s is None else f"; come back in {max(1, math.ceil(refusal.retry_after_s))} s"


def shed(decision: Shed, size: Size) -> PenstockError:
    reason = decision.reason
    if reason is ShedReason.TOO_LARGE:
        prompt = f", {size.exact} of them in the prompt," if size.exact is not None else ""
        return ContextLengthExceeded(
            f"this request needs a context of at least {size.context_tokens} tokens{prompt} and no replica has so much"
        )
    if reason is ShedReason.NOT_LOADED:
        return EngineUnavailable(decision.detail, reason=reason.value, retry_after_s=decision.retry_after_s)
    if reason is ShedReason.NO_REPLICA:
        what = "no replica of this model is ready"
        if ADAPTER.reason in decision.detail:
            what = "no replica that is ready has this adapter"
        elif CONTEXT.reason in decision.detail:
            what = "no replica that is ready has a context of this length"
        if decision.is_expected and decision.retry_after_s is not None:
            what += f"; one is expected in about {math.ceil(decision.retry_after_s)} s"
        return EngineUnavailable(what, reason=reason.value, retry_after_s=decision.retry_after_s)
    return Overloaded(
        f"too much is asked of this model: {reason.value}", reason=reason.value, retry_after_s=decision.retry_after_s
    )

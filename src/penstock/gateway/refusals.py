"""What a client is told when its request is not let in: the limiter's and the admission's reasons as typed errors."""

from __future__ import annotations

from typing import Protocol

from penstock.admission.decision import Shed, ShedReason
from penstock.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    Overloaded,
    PenstockError,
    RateLimited,
    TooLargeForLimit,
)
from penstock.gateway.sizes import Size
from penstock.router.filters import ADAPTER, CONTEXT
from penstock.tenancy.limits.quota import UNIT, Quota, Reason, Refusal


class Reserved(Protocol):
    """The reservation of a request, and its purpose (`sizes`)."""

    exact: int | None
    most: int

    @property
    def reserved(self) -> int: ...


def limited(refusal: Refusal, quota: Quota, size: Reserved) -> PenstockError:
    if refusal.reason is Reason.TOO_LARGE and quota.tokens is not None:
        prompt = f"{size.exact} tokens" if size.exact is not None else f"up to {size.most} tokens"
        return TooLargeForLimit(
            f"with a prompt of {prompt} and its output limit this request needs {size.reserved} tokens, and this "
            f"tenant's limit never grants more than {quota.tokens.largest // UNIT} at once",
            reason=refusal.reason.value,
        )
    return RateLimited(
        f"this tenant's limit is reached: {refusal.reason.value}",
        reason=refusal.reason.value,
        retry_after_s=refusal.retry_after_s,
    )


def shed(decision: Shed, size: Size) -> PenstockError:
    reason = decision.reason
    if reason is ShedReason.TOO_LARGE:
        prompt = f", {size.exact} of them in the prompt," if size.exact is not None else ""
        return ContextLengthExceeded(
            f"this request needs a context of at least {size.context_tokens} tokens{prompt} and no replica has so much"
        )
    if reason is ShedReason.NO_REPLICA:
        what = "no replica of this model is ready"
        if ADAPTER.reason in decision.detail:
            what = "no replica that is ready has this adapter"
        elif CONTEXT.reason in decision.detail:
            what = "no replica that is ready has a context of this length"
        return EngineUnavailable(what, reason=reason.value, retry_after_s=decision.retry_after_s)
    return Overloaded(
        f"too much is asked of this model: {reason.value}", reason=reason.value, retry_after_s=decision.retry_after_s
    )

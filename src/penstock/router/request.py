"""A request as the edge's policies see it: names and sizes, never text."""

from __future__ import annotations

import msgspec

from penstock.core.request import Priority


class EdgeRequest(msgspec.Struct, frozen=True, gc=False):
    id: str
    model: str  # the pool it was routed to
    prompt_tokens: int  # counted, or bounded from above
    max_tokens: int  # the output limit
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    session: str | None = None
    deadline: float | None = None  # when it is of no use to wait any longer; None: the class's patience
    draw: float = 0.0  # in [0, 1): all the randomness the policies get
    fingerprint: int = 0  # equal for a request and its retry, so that who was told to come back is known again
    allowed: frozenset[str] | None = None  # replica ids; None: all
    avoid: frozenset[str] = frozenset()  # replica ids that were tried already

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

"""Settings of responses that are kept: the group `responses` of a gateway's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.core.settings import setting
from penstock.tenancy.responses import ResponseLimits


@dataclass(frozen=True)
class ResponseSettings:
    keep_s: Annotated[float, Meta(ge=0)] = setting(
        86400.0, "how long a response is kept in the store; 0: none is, and what would need one is refused"
    )
    max_per_tenant: Annotated[int, Meta(ge=1)] = setting(10_000, "responses of a tenant; beyond that its oldest go")
    max_bytes_per_tenant: Annotated[int, Meta(ge=1 << 20)] = setting(256 << 20, "and how much room they have together")
    max_background: Annotated[int, Meta(ge=2)] = setting(
        256, "responses that a process makes in the background at a time, one tenant's at most half of them"
    )

    max_event_bytes: Annotated[int, Meta(ge=1 << 20)] = setting(
        128 << 20, "memory of a process for events of streams in the background; one has at most an eighth of it"
    )

    @property
    def limits(self) -> ResponseLimits:
        return ResponseLimits(self.keep_s, self.max_per_tenant, self.max_bytes_per_tenant)

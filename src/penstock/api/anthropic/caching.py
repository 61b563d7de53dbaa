"""Cache breakpoints of Anthropic's clients: the places where they want their prompts cached."""

from __future__ import annotations

from typing import Literal

from penstock.api.decoding import WireStruct

ALWAYS_CACHED = "prefixes are cached without it; the usage tells the cached tokens"


class CacheControl(WireStruct):
    """A hint: prefixes are cached without being asked, and found by content."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

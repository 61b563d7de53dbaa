"""A request as the edge's policies see it: names and sizes, never text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import force_setattr

from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.request import Priority


class EdgeRequest(msgspec.Struct, frozen=True, gc=False):
    """Fields that follow from others are stored, since policies ask for them again and again; nobody gives them."""

    id: str
    model: str  # the pool it was routed to
    prompt_tokens: int  # counted, or estimated
    max_tokens: int  # the output limit
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    session: str | None = None
    deadline: float | None = None  # when it is of no use to wait any longer; None: the class's patience
    random01: float = 0.0  # in [0, 1): all the randomness the policies get
    fingerprint: int = 0  # equal for a request and its retry, so that who was told to come back is known again
    allowed: frozenset[str] | None = None  # replica ids; None: all
    avoid: frozenset[str] = frozenset()  # replica ids that were tried already
    context_tokens: int | None = None  # what its longest sequence surely needs; None: all that it may
    hashes: Sequence[int] = ()  # of the prompt's routing blocks, from its beginning; none: not known, or too short
    block_tokens: int = ROUTING_TOKENS  # in each of them
    expected_output: int = 0  # tokens, by what such requests had or a hint; 0: not known
    holds_cache: bool = True  # else it is of whole texts, which are computed and leave nothing there
    can_pull: bool = True  # its replica can be told where to pull KV blocks of its prompt from
    adapter: str = ""  # the LoRA adapter that its replica must have; empty: none
    version: str = ""  # that it is measured by, name@version; empty: its route has none. No policy reads it

    output_tokens: int = 0  # what its output probably comes to
    kv_tokens: int = 0  # what it probably fills

    def __post_init__(self) -> None:
        expected, most = self.expected_output, self.max_tokens
        output_tokens = expected if 0 < expected < most else most
        force_setattr(self, "output_tokens", output_tokens)
        force_setattr(self, "kv_tokens", self.prompt_tokens + output_tokens if self.holds_cache else 1)

    def tokens_of(self, blocks: int) -> int:
        """The prompt's tokens in its first blocks, as far as they need not be computed: the last one always is."""
        tokens = blocks * self.block_tokens
        return tokens if tokens < self.prompt_tokens else self.prompt_tokens - 1

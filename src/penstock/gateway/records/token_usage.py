"""Token usage of a request, read from the end of its answer: the one place of a stream that is looked into."""

from __future__ import annotations

import json

import msgspec

from penstock.core.request import Cost
from penstock.tenancy.prices import Price

_decode = json.JSONDecoder().raw_decode
_KEY = b'"usage":'
MAX_TOKENS = 2**40  # of one request: what says more is no count of tokens, and no store could hold a few of them


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    work: Cost | None = None  # as replicas measured it; None: they did not say

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def nanos(self, price: Price) -> int:
        device_s = self.work.device_s if self.work is not None else 0.0
        return price.nanos(self.input_tokens, self.cached_tokens, self.output_tokens, device_s)


NO_TOKENS = TokenUsage(0, 0)


def find_usage(tail: bytes) -> TokenUsage | None:
    """The last usage in these bytes, in OpenAI's words or in Anthropic's; None: there is none, or it is of nothing."""
    end = len(tail)
    while (at := tail.rfind(_KEY, 0, end)) >= 0:
        end = at
        try:
            found, _ = _decode(tail[at + len(_KEY) :].decode(errors="replace").lstrip())
        except (ValueError, RecursionError):
            continue  # cut off by the beginning of the next event, or nobody's usage
        if isinstance(found, dict):
            usage = _usage(found)
            if total := usage.input_tokens + usage.output_tokens:
                return usage if total <= MAX_TOKENS and usage.cached_tokens <= MAX_TOKENS else None
    return None


def _usage(found: dict[str, object]) -> TokenUsage:
    """Anthropic counts a prompt in parts: what came from a cache, or went into one, is not among its input tokens. In
    OpenAI's responses it is, and is told in the details."""
    details = found.get("prompt_tokens_details", found.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else found.get("cache_read_input_tokens")
    if "prompt_tokens" in found:
        prompt = _number(found["prompt_tokens"])
    else:
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        prompt = sum([_number(found.get(part)) for part in parts])
    return TokenUsage(
        prompt,
        _number(found.get("completion_tokens", found.get("output_tokens"))),
        _number(cached) if cached is not None else 0,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0

"""The request of /v1/completions: one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from penstock.api.decoding import NotBuilt, Refused, decode
from penstock.api.openai.generation import GenerationRequest, TokenId, check_token_ids
from penstock.core.errors import UnsupportedParameter

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only
MAX_TOTAL_CHOICES = 1024  # prompts times n

Prompt = str | list[int]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]

    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # OpenAI stops at 5
    best_of: int | None = None
    suffix: Annotated[Any, NotBuilt("")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list) and len(set(map(type, self.prompt))) > 1:
            raise Refused("prompt", "expected only strings, only token ids or only lists of token ids, got a mixture")
        if self.best_of not in (None, self.n or 1):
            raise Refused("best_of", "is only supported when it equals n", UnsupportedParameter)
        if self.echo and self.logprobs is not None:
            raise Refused("echo", "is not supported together with logprobs", UnsupportedParameter)
        if len(self._prompts()) * (self.n or 1) > MAX_TOTAL_CHOICES:
            raise Refused("prompt", f"asks for more than {MAX_TOTAL_CHOICES} choices, n for each prompt")

    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Every prompt, in order. Raises InvalidRequest for token ids that do not exist."""
        prompts = self._prompts()
        for prompt in prompts:
            if isinstance(prompt, list):
                check_token_ids(prompt, vocab_size, "prompt")
        return prompts

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return cast(list[Prompt], self.prompt)


_DECODER = msgspec.json.Decoder(CompletionRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    return decode(_DECODER, body)

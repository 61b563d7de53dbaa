"""The request of /v1/completions: one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Protocol, cast

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, decode
from penstock.api.openai.generation import MAX_CHOICES, MAX_LOGPROBS, GenerationRequest, TokenId, check_token_ids
from penstock.core.errors import UnsupportedParameter

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only
MAX_TOTAL_CHOICES = 1024  # prompts times n

MAX_SUFFIX = 1 << 20  # characters

Prompt = str | list[int]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class FillIn(Protocol):
    """Prompt format in which a model is asked for what is between two texts."""

    def prompt(self, before: str, after: str) -> str: ...


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]

    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # OpenAI stops at 5
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str, Meta(max_length=MAX_SUFFIX)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list) and len(set(map(type, self.prompt))) > 1:
            raise Refused("prompt", "expected only strings, only token ids or only lists of token ids, got a mixture")
        if self.suffix and self.echo:
            raise Refused("suffix", "cannot go with echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self._prompts()):
            raise Refused("suffix", "needs prompts of text: token ids can have their own fill-in-the-middle tokens")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise Refused("best_of", f"must not be less than n, {self.n}")
        if self.stream and self.is_chosen():
            raise Refused("best_of", "cannot be streamed: the best are known at the end")
        if len(self._prompts()) * self.num_choices() > MAX_TOTAL_CHOICES:
            raise Refused("prompt", f"asks for more than {MAX_TOTAL_CHOICES} choices, n or best_of for each prompt")

    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def num_choices(self) -> int:
        return self.best_of or self.n or 1

    def is_chosen(self) -> bool:
        """Whether only the best of the choices are shown."""
        return self.num_choices() > (self.n or 1)

    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.is_chosen() else self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def prompts(self, vocab_size: int, fill_in: FillIn | None) -> list[Prompt]:
        """Every prompt, in order. `fill_in`: the model's marks. Raises InvalidRequest for token ids that do not exist,
        and for a suffix where the model has no marks."""
        prompts = self._prompts()
        if self.suffix:
            if fill_in is None:
                raise UnsupportedParameter(
                    "suffix: this model's files name no fill-in-the-middle tokens", param="suffix"
                )
            return [fill_in.prompt(str(prompt), self.suffix) for prompt in prompts]
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

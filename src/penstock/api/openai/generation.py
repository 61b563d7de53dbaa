"""Fields that chat and completion requests share: every setting of generation, checked and converted in one place.

Fields are None when the client said nothing; the defaults live in `SamplingParams` and `GenerationOptions` only. Values
that need the vocabulary are checked on conversion, because only the server knows the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.api.decoding import NoEffect, NotBuilt, Refused, WireStruct
from penstock.api.openai.guided import (
    FORMS,
    NULL,
    Choices,
    GuideAsked,
    ResponseFormat,
    Source,
    StructuredOutputs,
    find_guide,
)
from penstock.core.errors import InvalidRequest
from penstock.core.request import Priority
from penstock.core.sampling import SamplingParams

MAX_CHOICES = 128  # OpenAI's limit on n
MAX_STOPS = 16  # OpenAI allows 4; clients of open models ask for more
MAX_BIASES = 1024  # OpenAI allows 300; each choice has them all
MAX_BIAS = 100
MAX_LOGPROBS = 20  # alternatives of a token
MAX_ALLOWED = 4096  # ids of tokens that may come; each choice has them all
MAX_BAD_WORDS = 128
_TOKEN_ID = re.compile(r"-?\d{1,18}", re.ASCII)
_MAX_ECHO = 40  # characters of the client's own words that an error repeats
_MAX_ECHOED = 5  # of these words

SERVICE_TIERS = {Priority.HIGH: "priority", Priority.NORMAL: "default", Priority.LOW: "flex"}  # OpenAI's words

# Reasons why fields change nothing in an answer, for the reference.
LABEL = "a label of the client's own"
SAME_USER = "a gateway sends requests of one user to the same replica"
SAME_KEY = "prefixes are found by content; a gateway sends requests of one key to the same replica"

INT32_MAX = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]

# Below this a softmax over float32 logits is greedy in all but name, and dividing by it overflows.
_GREEDY_TEMPERATURE = 1e-5
_SAME_IN_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_SAME_IN_OPTIONS = (
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "stream",
)


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request beyond how each token is chosen."""

    max_tokens: int | None = None  # None: as many as the context leaves room for
    min_tokens: int = 0
    n: int = 1  # choices per prompt
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None  # keep only this many, the last ones
    namespace: str = ""  # of the prefix cache
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk, as it is by then


class StreamOptions(WireStruct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: how often, where include_usage says whether
    include_obfuscation: Annotated[bool | None, NoEffect("nothing is padded")] = None

    @property
    def has_continuous_usage(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class GenerationRequest(WireStruct):
    model: Annotated[str, Meta(min_length=1)]

    max_tokens: PositiveCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extensions, under the names that users of vLLM know.
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # for the texts of tokens in log probabilities
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    truncation_side: Annotated[Any, NotBuilt("left")] = None  # which end is cut off
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Literal["high", "normal", "low", 0, 1, 2] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    watermark: Annotated[str, Meta(min_length=1, max_length=63)] | None = None  # penstock's own

    # Labels for the client's own books.
    user: Annotated[str | None, NoEffect(SAME_USER)] = None
    metadata: Annotated[dict[str, str] | None, NoEffect(LABEL)] = None
    safety_identifier: Annotated[str | None, NoEffect(LABEL)] = None
    prompt_cache_key: Annotated[str | None, NoEffect(SAME_KEY)] = None

    store: Annotated[bool | None, NotBuilt(False)] = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    # Forms that the answer must have: see `guided`.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = NULL
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    json_schema: msgspec.Raw = NULL
    regex: Source | None = None
    ebnf: Source | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options", "is only allowed when stream is true")
        if self.priority is not None and self.service_tier not in (None, "auto"):
            raise Refused("service_tier", "cannot go with priority: both say how urgent the request is")
        if self.stream and self.prompt_logprobs is not None:
            raise Refused("prompt_logprobs", "is not available in a stream")
        self._check_biases()
        if self.allowed_token_ids and self.bad_words:
            raise Refused("bad_words", "cannot go with allowed_token_ids: nothing might be left")
        limit = self.output_limit()
        if limit is not None and (self.min_tokens or 0) > limit:
            raise Refused("min_tokens", f"must not be more than the output limit, {limit}")
        if (asked := self.guide()) is not None and self.ignore_eos:
            raise Refused("ignore_eos", f"cannot go with {asked.param}: a guided answer ends where its guide does")

    def _check_biases(self) -> None:
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise Refused("logit_bias", f"has more than {MAX_BIASES} tokens")
        if unknown := [key for key in self.logit_bias or () if not _TOKEN_ID.fullmatch(key)]:
            shown = ", ".join(f"'{key[:_MAX_ECHO]}'" for key in unknown[:_MAX_ECHOED])
            are = "is no token id" if len(unknown) == 1 else "are no token ids"
            raise Refused("logit_bias", f"{shown} {are}: expected every key to be an integer")
        for key, bias in (self.logit_bias or {}).items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise Refused("logit_bias", f"token {key} has {bias:g}; a bias is between -{MAX_BIAS} and {MAX_BIAS}")

    def guide(self) -> GuideAsked | None:
        """Guide of the answer's form, and the field that asks for it; None: there is none."""
        return find_guide(self, FORMS)

    def output_limit(self) -> int | None:
        """Number of tokens the client wants at most; None: as many as the context leaves room for."""
        return self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def num_logprobs(self) -> int | None:
        """Number of log probabilities, as in SamplingParams; each endpoint has its own way to ask for them."""
        return None

    def wished_priority(self) -> Priority | None:
        """Priority that the client asks for; None: it does not say."""
        if self.priority is not None:
            return Priority[self.priority.upper()] if isinstance(self.priority, str) else Priority(self.priority)
        return next((one for one, tier in SERVICE_TIERS.items() if tier == self.service_tier), None)

    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt; None: nothing is asked of these."""
        return self.prompt_logprobs

    def num_choices(self) -> int:
        """Choices that are made of each prompt."""
        return self.n or 1

    def to_sampling(self, vocab_size: int, *, fallback_seed: int) -> SamplingParams:
        """`fallback_seed` is used when the client gave none. Raises InvalidRequest for tokens that do not exist."""
        biases = {int(key): bias for key, bias in (self.logit_bias or {}).items()}
        check_token_ids(biases, vocab_size, "logit_bias")
        wanted = {"seed": fallback_seed} | self._given(_SAME_IN_SAMPLING)
        if self.logit_bias is not None:
            wanted["logit_bias"] = biases
        if self.allowed_token_ids is not None:
            check_token_ids(self.allowed_token_ids, vocab_size, "allowed_token_ids")
            wanted["allowed_ids"] = sorted(set(self.allowed_token_ids))
        if wanted.get("temperature", 1.0) < _GREEDY_TEMPERATURE:
            wanted["temperature"] = 0.0
        top_k = self.top_k if self.top_k is not None and 0 < self.top_k < vocab_size else None
        return SamplingParams(top_k=top_k, num_logprobs=self.num_logprobs(), **wanted)

    def to_options(self, vocab_size: int) -> GenerationOptions:
        check_token_ids(self.stop_token_ids or (), vocab_size, "stop_token_ids")
        return GenerationOptions(
            max_tokens=self.output_limit(),
            n=self.num_choices(),
            stop=self.stops(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            namespace=self.cache_salt or "",
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            continuous_usage=bool(self.stream_options and self.stream_options.has_continuous_usage),
            **self._given(_SAME_IN_OPTIONS),
        )

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of one of n choices: the first keeps the client's seed, the others get seeds of their own."""
    if index == 0:
        return sampling
    seed = (sampling.seed + index + 2**63) % 2**64 - 2**63  # stays an int64
    return msgspec.structs.replace(sampling, seed=seed)


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        missing = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"{param}: no token has the id {missing}; out of vocabulary, which has {vocab_size}", param=param
        )

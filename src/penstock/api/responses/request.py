"""The request of /v1/responses. A parsed one is valid, but for what only the model, or a store of responses, can tell.

It becomes a chat request. `previous_response_id`, `store` and `background` change nothing here: whoever keeps responses
puts the earlier items before the input, and sends on what is left.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.api import openai
from penstock.api.decoding import NoEffect, NotBuilt, Refused, WireStruct, decode
from penstock.api.openai.generation import (
    INT32_MAX,
    LABEL,
    MAX_STOPS,
    SAME_KEY,
    SAME_USER,
    Count,
    PositiveCount,
    StopString,
)
from penstock.api.openai.guided import NULL, GuideAsked, JsonSchema, ResponseFormat
from penstock.api.openai.reasoning import ReasoningEffort
from penstock.api.openai.tools import MAX_TOOLS, check_offer
from penstock.api.responses.items import Item, to_messages
from penstock.api.responses.tools import Offer, Tool, ToolChoice, offer_of
from penstock.core.errors import UnsupportedParameter

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the latter changes nothing: thoughts are told as they are
MAX_ID = 128  # characters of a response's id

ResponseId = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextFormat(WireStruct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_schema = self.schema != NULL
        if self.type == "json_schema" and not has_schema:
            raise Refused("schema", "is required when type is json_schema")
        if self.type != "json_schema" and has_schema:
            raise Refused("schema", f"cannot go with the type {self.type}")

    def to_chat(self) -> ResponseFormat | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ResponseFormat(type="json_object")
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(name=self.name, schema=self.schema))

    def to_wire(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        described = {"name": self.name, "description": self.description, "schema": self.schema, "strict": self.strict}
        return {"type": self.type, **described}


WHOLE_THOUGHTS = "thoughts are told, and not summed up"


class TextOptions(WireStruct):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, NotBuilt("medium")] = None


class Reasoning(WireStruct):
    effort: ReasoningEffort | None = None
    summary: Annotated[Literal["auto", "concise", "detailed", "none"] | None, NoEffect(WHOLE_THOUGHTS)] = None
    generate_summary: Annotated[Literal["auto", "concise", "detailed"] | None, NoEffect(WHOLE_THOUGHTS)] = None


class StreamOptions(WireStruct):
    include_obfuscation: Annotated[bool | None, NoEffect("nothing is padded")] = None


class Kept(WireStruct):
    """State that a gateway has already seen to for this request: the response repeats it."""

    previous_response_id: ResponseId | None = None
    store: bool = False
    background: bool = False


class ResponsesRequest(WireStruct, dict=True):
    model: Annotated[str, Meta(min_length=1)]
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[PositiveCount | None, NoEffect("no tools are run by the server")] = None

    # Fields for servers that keep responses.
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    background: bool | None = None
    kept: Kept | None = None  # penstock's own, in their place: nothing is left to be done about them

    # Labels for the client's own books; the response repeats the first.
    metadata: Metadata | None = None
    user: Annotated[str | None, NoEffect(SAME_USER)] = None
    safety_identifier: Annotated[str | None, NoEffect(LABEL)] = None
    prompt_cache_key: Annotated[str | None, NoEffect(SAME_KEY)] = None
    client_metadata: Annotated[Any, NoEffect("Codex's own label")] = None

    # Extensions, as in a chat.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Literal["high", "normal", "low", 0, 1, 2] | None = None
    watermark: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    service_tier: Annotated[str | None, NotBuilt("auto", "default")] = None
    prompt: Annotated[Any, NotBuilt()] = None
    conversation: Annotated[Any, NotBuilt()] = None
    context_management: Annotated[Any, NotBuilt([])] = None
    prompt_cache_options: Annotated[Any, NotBuilt()] = None
    prompt_cache_retention: Annotated[Any, NotBuilt("in_memory")] = None
    moderation: Annotated[Any, NotBuilt()] = None
    access_programs: Annotated[Any, NotBuilt()] = None
    image: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options", "is only allowed when stream is true")
        for name in self.include or ():
            if name not in _INCLUDED:
                problem = f"'{name[:100]}' is not supported by this server; {LOGPROBS} is"
                raise Refused("include", problem, UnsupportedParameter)
        if self.top_logprobs is not None and not self.has_logprobs:
            raise Refused("top_logprobs", f"needs {LOGPROBS} among `include`")
        if self.background and self.store is False:
            raise Refused("background", "can only be used when `store` is true")
        if not (self.input or self.instructions or self.previous_response_id):
            raise Refused("input", "is empty")
        self._offer = offer_of(self.tools, self.tool_choice)
        check_offer(self._offer.tools, self._offer.choice)
        self.guide()  # or refused
        self._chat = self._to_chat()

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def format(self) -> TextFormat:
        asked = self.text.format if self.text is not None else None
        return asked or TextFormat(type="text")

    @property
    def drops_turns(self) -> bool:
        """Whether the oldest turns may be left out of a conversation that is longer than the context."""
        return self.truncation == "auto"

    def guide(self) -> GuideAsked | None:
        asked = self.format.to_chat()
        try:
            guide = asked.guide() if asked is not None else None
        except ValueError as problem:
            raise Refused("text.format", str(problem)) from None
        return None if guide is None else GuideAsked(guide, "text")

    def to_chat(self) -> openai.ChatRequest:
        return self._chat

    def _to_chat(self) -> openai.ChatRequest:
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        offer: Offer = self._offer
        return openai.ChatRequest(
            model=self.model,
            messages=to_messages(self.instructions, items),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.has_logprobs or None,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
            tools=offer.tools or None,
            tool_choice=offer.choice if offer.tools else None,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=self.format.to_chat(),
            user=self.user,
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            seed=self.seed,
            stop=self.stop,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            priority=self.priority,
            watermark=self.watermark,
            chat_template_kwargs=self.chat_template_kwargs,
        )


_DECODER = msgspec.json.Decoder(ResponsesRequest)


def parse_responses(body: bytes) -> ResponsesRequest:
    return decode(_DECODER, body)

"""The requests of /v1/messages and its count_tokens. A parsed one is valid, but for what only the model can tell.

A message request says nothing that a chat request cannot say, so it becomes one, and what is behind the wire knows one
kind of conversation only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.api import openai
from penstock.api.decoding import NotBuilt, Refused, WireStruct, decode
from penstock.api.openai.generation import MAX_STOPS, Count, PositiveCount, StopString
from penstock.core.errors import UnsupportedParameter


class CacheControl(WireStruct):
    """A hint: prefixes are cached without being asked, and found by content."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(WireStruct):
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None

    # Clients send an answer back as they received it, empty fields included.
    citations: Annotated[Any, NotBuilt([])] = None
    parsed_output: Annotated[Any, NotBuilt()] = None

    # Of the other types, so that these are refused for what they are and not for a field.
    source: Annotated[Any, NotBuilt()] = None
    title: Annotated[Any, NotBuilt()] = None
    context: Annotated[Any, NotBuilt()] = None
    id: Annotated[Any, NotBuilt()] = None
    name: Annotated[Any, NotBuilt()] = None
    input: Annotated[Any, NotBuilt()] = None
    caller: Annotated[Any, NotBuilt()] = None
    tool_use_id: Annotated[Any, NotBuilt()] = None
    content: Annotated[Any, NotBuilt()] = None
    is_error: Annotated[Any, NotBuilt()] = None
    thinking: Annotated[Any, NotBuilt()] = None
    signature: Annotated[Any, NotBuilt()] = None
    data: Annotated[Any, NotBuilt()] = None
    file_id: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise Refused("type", "only blocks of type 'text' are supported by this server", UnsupportedParameter)
        super().__post_init__()
        if self.text is None:
            raise Refused("text", "is required")


Content = str | list[ContentBlock]


class Message(WireStruct):
    role: Literal["user", "assistant", "system"]
    content: Content


class Metadata(WireStruct):
    """Labels for the client's own books: they change nothing here."""

    user_id: str | None = None


class PromptRequest(WireStruct):
    """What makes the prompt."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: Content | None = None
    cache_control: CacheControl | None = None

    tools: Annotated[Any, NotBuilt([])] = None
    tool_choice: Annotated[Any, NotBuilt({"type": "none"}, {"type": "auto"})] = None
    thinking: Annotated[Any, NotBuilt({"type": "disabled"})] = None
    output_config: Annotated[Any, NotBuilt({})] = None
    output_format: Annotated[Any, NotBuilt()] = None
    context_management: Annotated[Any, NotBuilt()] = None
    mcp_servers: Annotated[Any, NotBuilt([])] = None
    speed: Annotated[Any, NotBuilt("standard")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.messages[-1]
        if last.role == "assistant" and (text := _text(last.content)) != text.rstrip():
            raise Refused("messages", "the text of a final assistant message cannot end with whitespace")

    def to_chat(self) -> openai.ChatRequest:
        """The system prompt goes first, turns of one role in a row are one turn, and a last turn of the assistant's is
        the beginning of the answer."""
        turns: list[openai.Message] = []
        if self.system and (system := _text(self.system)):
            turns.append(openai.Message(role="system", content=system))
        for message in self.messages:
            text = _text(message.content)
            if turns and turns[-1].role == message.role:
                turns[-1].content = f"{turns[-1].content}\n{text}"
            else:
                turns.append(openai.Message(role=message.role, content=text))
        if len(turns) > 1 and turns[-1].role == "assistant" and not turns[-1].content:
            turns.pop()  # the beginning of an answer that begins with nothing
        return openai.ChatRequest(
            model=self.model, messages=turns, continue_final_message=turns[-1].role == "assistant"
        )


class CountTokensRequest(PromptRequest):
    pass


class MessagesRequest(PromptRequest, kw_only=True):
    max_tokens: PositiveCount
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # Anthropic's stop at 1
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None  # 0: off
    stream: bool | None = None
    metadata: Metadata | None = None

    # Extensions, as in the OpenAI API.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Literal["high", "normal", "low", 0, 1, 2] | None = None

    service_tier: Annotated[str | None, NotBuilt("auto", "standard_only")] = None
    container: Annotated[Any, NotBuilt()] = None
    inference_geo: Annotated[Any, NotBuilt()] = None
    diagnostics: Annotated[Any, NotBuilt()] = None

    def to_chat(self) -> openai.ChatRequest:
        return msgspec.structs.replace(
            super().to_chat(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            seed=self.seed,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content)


_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT_TOKENS = msgspec.json.Decoder(CountTokensRequest)


def parse_messages(body: bytes) -> MessagesRequest:
    return decode(_MESSAGES, body)


def parse_count_tokens(body: bytes) -> CountTokensRequest:
    return decode(_COUNT_TOKENS, body)

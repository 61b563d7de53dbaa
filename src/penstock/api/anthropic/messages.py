"""The requests of /v1/messages and its count_tokens. A parsed one is valid, but for what only the model can tell.

A message request says nothing that a chat request cannot say, so it becomes one, and what is behind the wire knows one
kind of conversation only.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.api import openai
from penstock.api.anthropic.blocks import Content, calls_of, content_of, results_of, text_of, thoughts_of
from penstock.api.anthropic.caching import ALWAYS_CACHED, CacheControl
from penstock.api.anthropic.output import OutputConfig, OutputFormat, guide_of
from penstock.api.anthropic.tools import Tool, ToolChoice
from penstock.api.decoding import NoEffect, NotBuilt, Refused, WireStruct, decode
from penstock.api.openai.chat import joined_contents
from penstock.api.openai.generation import MAX_STOPS, SAME_USER, Count, PositiveCount, StopString
from penstock.api.openai.guided import GuideAsked
from penstock.api.openai.reasoning import ThinkingOption
from penstock.api.openai.tools import MAX_TOOLS, ToolDefinition, check_offer
from penstock.core.errors import ThreadUnsupported, UnsupportedParameter


class Message(WireStruct):
    role: Literal["user", "assistant", "system"]
    content: Content

    def __post_init__(self) -> None:
        super().__post_init__()
        owners = {"tool_result": "user", "image": "user"} | dict.fromkeys(
            ("tool_use", "thinking", "redacted_thinking"), "assistant"
        )
        for block in [] if isinstance(self.content, str) else self.content:
            if (owner := owners.get(block.type, self.role)) != self.role:
                raise Refused("content", f"blocks of type {block.type} belong to the {owner}")


class Metadata(WireStruct):
    """Labels for the client's own books: they change nothing here."""

    user_id: Annotated[str | None, NoEffect(SAME_USER)] = None


class PromptRequest(WireStruct):
    """Fields of a request that make the prompt."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: Content | None = None
    cache_control: Annotated[CacheControl | None, NoEffect(ALWAYS_CACHED)] = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None

    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: Annotated[Any, NotBuilt()] = None
    mcp_servers: Annotated[Any, NotBuilt([])] = None
    speed: Annotated[Any, NotBuilt("standard")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_offer(self._offer(), self._choice())
        if isinstance(self.system, list) and any(block.type == "image" for block in self.system):
            raise Refused("system", "only users and results of tools show images", UnsupportedParameter)
        if self.output_format is not None and self._format() is not self.output_format:
            raise Refused("output_format", "cannot go with output_config.format: an answer has one format")
        self.guide()  # or refused
        last = self.messages[-1]
        if last.role == "assistant" and (text := text_of(last.content)) != text.rstrip():
            raise Refused("messages", "the text of a final assistant message cannot end with whitespace")
        end = itertools.takewhile(lambda message: message.role == "assistant", reversed(self.messages))
        if any(calls_of(message.content) for message in end):
            raise Refused("messages", "a tool_use needs a tool_result in the message after it")

    def to_chat(self) -> openai.ChatRequest:
        """The system prompt goes first, turns of one role in a row are one turn, results of tools are turns of their
        own, and a last turn of the assistant's is the beginning of the answer."""
        turns: list[openai.Message] = []
        if self.system and (system := text_of(self.system)):
            turns.append(openai.Message(role="system", content=system))
        for place, message in enumerate(self.messages):
            path = f"messages[{place}].content"
            results = list(results_of(message.content, path))
            turns += results
            content = content_of(message.content, path)
            if content or not results:
                calls, thoughts = calls_of(message.content), thoughts_of(message.content)
                turns.append(
                    openai.Message(
                        role=message.role,
                        content=content,
                        tool_calls=calls or None,
                        reasoning_content=thoughts or None,
                    )
                )
        turns = [_joined(list(of_role)) for _, of_role in itertools.groupby(turns, _turn_of)]
        if len(turns) > 1 and turns[-1].role == "assistant" and not turns[-1].content:
            turns.pop()  # the beginning of an answer that begins with nothing
        choice = self.tool_choice
        return openai.ChatRequest(
            model=self.model,
            messages=turns,
            continue_final_message=turns[-1].role == "assistant",
            tools=self._offer() or None,
            tool_choice=self._choice(),
            thinking=self.thinking,
            reasoning_effort=self.output_config.effort if self.output_config is not None else None,
            response_format=asked.to_openai() if (asked := self._format()) is not None else None,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        )

    def guide(self) -> GuideAsked | None:
        param = "output_format" if self.output_format is not None else "output_config"
        try:
            return guide_of(self._format(), param)
        except ValueError as problem:
            raise Refused(param, str(problem)) from None

    def _format(self) -> OutputFormat | None:
        named = self.output_config.format if self.output_config is not None else None
        return named or self.output_format

    def _offer(self) -> list[ToolDefinition]:
        return [tool.to_openai() for tool in self.tools or ()]

    def _choice(self) -> openai.ToolChoice | None:
        return None if self.tool_choice is None else self.tool_choice.to_openai()


def _turn_of(message: openai.Message) -> object:
    """The key that messages of one turn share, in a row; results of tools are turns of their own."""
    return message.role if message.role != "tool" else id(message)


def _joined(messages: list[openai.Message]) -> openai.Message:
    if len(messages) == 1:
        return messages[0]
    content = joined_contents([message.content for message in messages])
    calls = [call for message in messages for call in message.tool_calls or ()]
    thoughts = "\n".join(message.reasoning_content for message in messages if message.reasoning_content)
    return openai.Message(
        role=messages[0].role, content=content, tool_calls=calls or None, reasoning_content=thoughts or None
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
    thread: Annotated[Any, NotBuilt(error=ThreadUnsupported)] = None  # a conversation that the server holds
    container: Annotated[Any, NotBuilt()] = None
    inference_geo: Annotated[Any, NotBuilt()] = None
    diagnostics: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise Refused(
                "thinking", f"budget_tokens is {budget}; the answer needs some of the {self.max_tokens} max_tokens"
            )

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


_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT_TOKENS = msgspec.json.Decoder(CountTokensRequest)


def parse_messages(body: bytes) -> MessagesRequest:
    return decode(_MESSAGES, body)


def parse_count_tokens(body: bytes) -> CountTokensRequest:
    return decode(_COUNT_TOKENS, body)

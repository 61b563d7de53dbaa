"""Input items: messages, calls of tools, what came of them, and reasoning; and what they are in a chat.

Clients send items back as they received them from any server, so members that are not read here are skipped, an id or a
status may be missing, and only an item's or a part's type decides whether it can be understood.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from penstock.api import openai
from penstock.api.decoding import Refused
from penstock.api.openai.chat import ContentPart, image_part, joined_contents
from penstock.api.openai.tools import FunctionCall, ToolCall
from penstock.core.errors import UnsupportedParameter

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Part(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None

    def __post_init__(self) -> None:
        if self.type == "input_image":
            if self.file_id is not None:
                raise Refused("file_id", "is not supported by this server: use image_url", UnsupportedParameter)
            if not self.image_url:
                raise Refused("image_url", "is required")
        elif self.type == "refusal":
            if self.refusal is None:
                raise Refused("refusal", "is required")
        elif self.type not in _TEXTS:
            known = ", ".join(f"'{kind}'" for kind in (*_TEXTS[:2], "input_image"))
            raise Refused("type", f"only parts of type {known} are supported by this server", UnsupportedParameter)
        elif self.text is None:
            raise Refused("text", "is required")


Content = str | list[Part]


class Item(msgspec.Struct):
    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None  # of a message, and of reasoning
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool's call
    output: Content | None = None
    summary: list[Part] | None = None

    def __post_init__(self) -> None:
        if self.type not in _NEEDED:
            known = ", ".join(f"'{kind}'" for kind in _NEEDED)
            raise Refused("type", f"only items of type {known} are supported by this server", UnsupportedParameter)
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise Refused(field, "is required")
        shown = self.output if self.type.endswith("_output") else self.content
        is_shown = self.type.endswith("_output") or (self.type == "message" and self.role == "user")
        if _has_images(shown) and not is_shown:
            raise Refused("content", "only users and results of tools show images", UnsupportedParameter)

    @property
    def thoughts(self) -> str:
        """Thoughts of a reasoning item. A server that encrypts them may tell a summary; where there is neither, the
        model is told none."""
        return text_of(self.content) or text_of(self.summary)

    def to_message(self, path: str) -> openai.Message:
        """The item as a message of its own; `path`: where it is in the body."""
        match self.type:
            case "message":
                return openai.Message(role=self.role or "user", content=content_of(self.content, f"{path}.content"))
            case "reasoning":
                return openai.Message(role="assistant", content="", reasoning_content=self.thoughts)
            case "function_call" | "custom_tool_call":
                arguments = self.arguments if self.input is None else json.dumps({"input": self.input})
                call = FunctionCall(name=self.name or "", arguments=arguments or "")
                return openai.Message(
                    role="assistant", content="", tool_calls=[ToolCall(id=self.call_id or "", function=call)]
                )
            case _:
                output = content_of(self.output, f"{path}.output")
                return openai.Message(role="tool", content=output, tool_call_id=self.call_id)


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


def content_of(content: Content | None, path: str) -> openai.Content:
    """Text and images, as a chat has them."""
    if isinstance(content, str) or content is None or not _has_images(content):
        return text_of(content)
    return [
        ContentPart(type="text", text=part.text or part.refusal or "")
        if part.image_url is None
        else image_part(part.image_url, part.detail, f"{path}[{at}].image_url")
        for at, part in enumerate(content)
    ]


def _has_images(content: Content | None) -> bool:
    return isinstance(content, list) and any(part.type == "input_image" for part in content)


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[openai.Message]:
    """A conversation. Items of the assistant in a row are one turn; so are system prompts at the beginning, and
    messages of a user in a row, since many templates take no others."""
    turns = [openai.Message(role="system", content=instructions)] if instructions else []
    said = enumerate(items)
    turns += [item.to_message(f"input[{at}]") for at, item in said if item.type != "reasoning" or item.thoughts]
    return [_joined(list(of_role)) for _, of_role in itertools.groupby(turns, _turn_of)]


def _turn_of(message: openai.Message) -> object:
    """The key that messages of one turn share; results of tools are turns of their own."""
    if message.role in ("system", "developer"):
        return "system"
    return message.role if message.role != "tool" else id(message)


def _joined(messages: list[openai.Message]) -> openai.Message:
    if len(messages) == 1:
        return messages[0]
    role = messages[0].role
    calls = [call for message in messages for call in message.tool_calls or ()]
    return openai.Message(
        role=role,
        content=joined_contents([message.content for message in messages if message.content]),
        tool_calls=calls or None,
        reasoning_content=_lines(message.reasoning_content or "" for message in messages) or None,
    )


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)

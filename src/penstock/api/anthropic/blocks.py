"""The content of a message: text, an image, a call of a tool, or what came of one; and what they are in a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from penstock.api import openai
from penstock.api.anthropic.caching import CacheControl
from penstock.api.decoding import NotBuilt, Refused, WireStruct
from penstock.api.openai.chat import ContentPart, image_part
from penstock.api.openai.tools import FunctionCall, ToolCall
from penstock.core.errors import UnsupportedParameter

_NEEDED = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
}
_ALLOWED = {"tool_result": ("content", "is_error"), "thinking": ("signature",)}
_OF_A_TYPE = (
    *("text", "id", "name", "input", "tool_use_id", "content", "is_error"),
    *("thinking", "signature", "data", "source"),
)


class Source(msgspec.Struct):
    """Source of an image. A source of another kind of block is not described: that block is refused as a whole."""

    type: str | None = None
    media_type: str | None = None  # not believed: bytes tell what they are
    data: str | None = None
    url: str | None = None

    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}" if self.url is None else self.url


class ContentBlock(WireStruct):
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None

    # tool_use and tool_result
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None

    # thinking and redacted_thinking, of an earlier answer
    thinking: str | None = None
    signature: str | None = None  # nobody here signs what it thinks, nor checks it
    data: str | None = None  # what only another provider can read: the model is not told

    # Clients send an answer back as they received it, empty fields included.
    citations: Annotated[Any, NotBuilt([])] = None
    parsed_output: Annotated[Any, NotBuilt()] = None
    caller: Annotated[Any, NotBuilt({"type": "direct"})] = None
    toolset_name: Annotated[Any, NotBuilt()] = None

    source: Source | None = None  # of an image

    # Fields of the other types, so that these are refused for what they are and not for a field.
    title: Annotated[Any, NotBuilt()] = None
    context: Annotated[Any, NotBuilt()] = None
    file_id: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        if self.type not in _NEEDED:
            known = ", ".join(f"'{kind}'" for kind in _NEEDED)
            raise Refused("type", f"only blocks of type {known} are supported by this server", UnsupportedParameter)
        super().__post_init__()
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise Refused(field, "is required")
        for field in _OF_A_TYPE:
            is_allowed = field in _NEEDED[self.type] or field in _ALLOWED.get(self.type, ())
            if not is_allowed and getattr(self, field) is not None:
                raise Refused(field, f"is not allowed in a block of type {self.type}")
        if isinstance(self.content, list) and any(block.type not in ("text", "image") for block in self.content):
            raise Refused("content", "only blocks of type 'text' and 'image' are supported here", UnsupportedParameter)
        if self.source is not None:
            self._check_source(self.source)

    def _check_source(self, source: Source) -> None:
        kinds = {"base64": ("data", "url"), "url": ("url", "data")}
        if source.type is None or source.type not in kinds:
            problem = "only sources of type 'base64' and 'url' are supported by this server"
            raise Refused("source", problem, UnsupportedParameter)
        needed, other = kinds[source.type]
        if not getattr(source, needed):
            raise Refused(f"source.{needed}", "is required")
        if getattr(source, other) is not None:
            raise Refused(f"source.{other}", f"is not allowed in a source of type {source.type}")


Content = str | list[ContentBlock]


def text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content if block.type == "text")


def content_of(content: Content, path: str) -> openai.Content:
    """Text and images, as a chat has them; `path`: of the content in the body."""
    if isinstance(content, str) or not any(block.type == "image" for block in content):
        return text_of(content)
    found: list[ContentPart] = []
    for at, block in enumerate(content):
        if block.source is not None:
            found.append(image_part(block.source.as_url(), None, f"{path}[{at}].source"))
        elif block.type == "text":
            found.append(ContentPart(type="text", text=block.text))
    return found


def thoughts_of(content: Content) -> str:
    """The assistant's thoughts before its answer."""
    blocks = [] if isinstance(content, str) else content
    return "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")


def calls_of(content: Content) -> list[ToolCall]:
    blocks = [] if isinstance(content, str) else content
    return [
        ToolCall(id=block.id or "", function=FunctionCall(name=block.name or "", arguments=_json(block.input)))
        for block in blocks
        if block.type == "tool_use"
    ]


def results_of(content: Content, path: str) -> Iterable[openai.Message]:
    for at, block in enumerate([] if isinstance(content, str) else content):
        if block.type == "tool_result":
            result = content_of(block.content or "", f"{path}[{at}].content")
            if block.is_error:  # a chat has no word for a failed call; the model is told in its own
                failed = ContentPart(type="text", text="Error: ")
                result = [failed, *result] if isinstance(result, list) else f"Error: {result}"
            yield openai.Message(role="tool", content=result, tool_call_id=block.tool_use_id)


def _json(value: dict[str, Any] | None) -> str:
    return json.dumps(value or {}, ensure_ascii=False)

"""The request of /v1/chat/completions. A parsed one is valid, but for what only the model can tell.

It ends at messages of text and of images, whose bytes nobody has looked at; how they become a prompt is the chat
template's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.api.decoding import NotBuilt, Refused, WireStruct, decode
from penstock.api.openai.generation import MAX_LOGPROBS, PositiveCount
from penstock.api.openai.reasoning import ReasoningRequest
from penstock.api.openai.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    check_offer,
)
from penstock.core.errors import UnsupportedParameter


class ImageUrl(WireStruct):
    url: Annotated[str, Meta(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None


class ContentPart(WireStruct):
    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: Annotated[Any, NotBuilt()] = None
    file: Annotated[Any, NotBuilt()] = None
    refusal: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type not in ("text", "image_url"):
            raise Refused(
                "type", "only parts of type 'text' and 'image_url' are supported by this server", UnsupportedParameter
            )
        other = "text" if self.type == "image_url" else "image_url"
        if getattr(self, self.type) is None:
            raise Refused(self.type, "is required")
        if getattr(self, other) is not None:
            raise Refused(other, f"is not allowed in a part of type {self.type}")

    @property
    def is_image(self) -> bool:
        return self.type == "image_url"

    def to_wire(self) -> dict[str, Any]:
        """The part as JSON for another server's chat API."""
        if (image := self.image_url) is None:
            return {"type": "text", "text": self.text}
        whole = {"url": image} if isinstance(image, str) else {"url": image.url, "detail": image.detail}
        return {"type": "image_url", "image_url": {name: value for name, value in whole.items() if value is not None}}

    def to_template(self) -> dict[str, Any]:
        return {"type": "image"} if self.is_image else {"type": "text", "text": self.text}


class ImagePart(ContentPart, kw_only=True):
    """An image of another API."""

    path: str  # in that API's body


def image_part(url: str, detail: str | None, path: str) -> ImagePart:
    return ImagePart(type="image_url", image_url=ImageUrl(url=url, detail=detail), path=path)  # type: ignore[arg-type]


class ImageAsked(NamedTuple):
    """An image that a request shows."""

    url: str  # data: or another
    is_low: bool  # few tokens are to be spent on it
    path: str  # path in the body of the part that shows it


Content = str | list[ContentPart] | None


def has_images(content: Content) -> bool:
    return isinstance(content, list) and any(part.is_image for part in content)


def _joined(content: Content) -> str:
    """The text of it."""
    return "\n".join(part.text or "" for part in content) if isinstance(content, list) else content or ""


def joined_contents(contents: Sequence[Content]) -> str | list[ContentPart]:
    """Contents of messages as that of one: texts have lines of their own."""
    if not any(map(has_images, contents)):
        return "\n".join(map(_joined, contents))
    found: list[ContentPart] = []
    for content in contents:
        parts = content if isinstance(content, list) else [ContentPart(type="text", text=content)] if content else []
        for at, part in enumerate(parts):
            is_next = at == 0 and bool(found) and not (part.is_image or found[-1].is_image)
            found.append(ContentPart(type="text", text=f"\n{part.text}") if is_next else part)
    return found


class Prediction(WireStruct):
    """Text that the client expects in the answer, to make it faster."""

    type: Literal["content"]
    content: str | list[ContentPart]

    def __post_init__(self) -> None:
        super().__post_init__()
        if has_images(self.content):
            raise Refused("content", "only text can be expected", UnsupportedParameter)

    def text(self) -> str:
        return _joined(self.content)


class Message(WireStruct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    # Fields of an assistant's earlier turn; its reasoning has two names, DeepSeek's and vLLM's.
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    # Clients send an answer back as they received it, empty fields included.
    function_call: Annotated[Any, NotBuilt()] = None
    annotations: Annotated[Any, NotBuilt([])] = None
    audio: Annotated[Any, NotBuilt()] = None
    refusal: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool_calls and self.role != "assistant":
            raise Refused("tool_calls", "only the assistant calls tools")
        if (thoughts := self.reasoning_content or self.reasoning) and self.role != "assistant":
            raise Refused("reasoning_content" if self.reasoning_content else "reasoning", "only the assistant reasons")
        if self.content is None and not (self.tool_calls or thoughts):
            raise Refused("content", "is required, as a string or a list of parts")
        if self.role not in ("user", "tool") and has_images(self.content):
            raise Refused("content", "only users and results of tools show images", UnsupportedParameter)

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates take it: content is one string, or parts if there are images, and the role
        `developer` becomes `system`."""
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._content(),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.to_template() for call in self.tool_calls] if self.tool_calls else None,
        }
        return {key: value for key, value in message.items() if value is not None}

    def _content(self) -> str | list[dict[str, Any]]:
        if isinstance(self.content, list) and has_images(self.content):
            return [part.to_template() for part in self.content]
        return _joined(self.content)


class ChatRequest(ReasoningRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]

    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    # Extensions: how the template is applied.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    echo: Annotated[Any, NotBuilt(False)] = None
    functions: Annotated[Any, NotBuilt([])] = None
    function_call: Annotated[Any, NotBuilt("none", "auto")] = None
    modalities: Annotated[Any, NotBuilt(["text"])] = None
    audio: Annotated[Any, NotBuilt()] = None
    prediction: Prediction | None = None
    verbosity: Annotated[Any, NotBuilt("medium")] = None
    web_search_options: Annotated[Any, NotBuilt()] = None
    moderation: Annotated[Any, NotBuilt()] = None
    prompt_cache_options: Annotated[Any, NotBuilt()] = None
    prompt_cache_retention: Annotated[Any, NotBuilt("in_memory")] = None

    def __post_init__(self) -> None:
        if self.functions:
            raise Refused("functions", "is not supported by this server: use tools", UnsupportedParameter)
        super().__post_init__()
        check_offer(self.tools, self.tool_choice)
        self.reasoning_asked()  # or refused
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Refused("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs", "is only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise Refused("continue_final_message", "cannot go with add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise Refused("continue_final_message", "needs a last message from the assistant")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise Refused("continue_final_message", "a message that calls tools cannot be continued")
        if self.must_call() and self.ignore_eos:
            raise Refused("ignore_eos", "cannot go with this tool_choice: the answer ends with its calls")

    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        return [message.to_template() for message in self.messages]

    def images(self) -> list[ImageAsked]:
        """Images of all messages, in the order in which templates render them."""
        found = []
        for place, message in enumerate(self.messages):
            for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if (image := part.image_url) is not None:
                    whole = image if isinstance(image, ImageUrl) else ImageUrl(url=image)
                    path = part.path if isinstance(part, ImagePart) else f"messages[{place}].content[{at}].image_url"
                    found.append(ImageAsked(whole.url, whole.detail == "low", path))
        return found

    def template_variables(self) -> dict[str, Any]:
        """Variables of the template besides messages and tools."""
        return self.reasoning_asked().variables() | (self.chat_template_kwargs or {})

    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def callable_tools(self) -> list[FunctionDefinition]:
        """The one that must be called, or all of them."""
        named = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool.definition() for tool in self.tools or ()]
        return [tool for tool in tools if named is None or tool.name == named.name]

    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model is told of. The choice which of them it must call changes nothing here, so prompts keep
        their beginning; a model that is to call none is told of none."""
        if not self.may_call():
            return []
        return [{"type": "function", "function": tool.definition().to_template()} for tool in self.tools or ()]

    def opens_answer(self) -> bool:
        """Whether the template is to end by opening the assistant's turn: yes, unless told otherwise."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


_DECODER = msgspec.json.Decoder(ChatRequest)


def parse_chat(body: bytes) -> ChatRequest:
    return decode(_DECODER, body)

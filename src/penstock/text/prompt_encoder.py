"""Encoding of a request as the text and the ids that the model sees: a replica generates from them, a gateway counts.

It knows no API: a chat is whatever can say what `Chat` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from penstock.core.errors import InvalidRequest
from penstock.text.chat import ChatTemplate

Message = dict[str, Any]


class Chat(Protocol):
    @property
    def continue_final_message(self) -> bool | None: ...

    def template_variables(self) -> dict[str, Any]: ...

    def conversation(self) -> list[dict[str, Any]]: ...

    def offered_tools(self) -> list[dict[str, Any]]: ...

    def opens_answer(self) -> bool: ...


def render(template: ChatTemplate, chat: Chat) -> str:
    messages, tools = chat.conversation(), chat.offered_tools()
    return _render(template, chat, messages, tools)


def render_with_images(template: ChatTemplate, chat: Chat, placeholder: str, num_images: int) -> str:
    """Text of a chat that shows images, each of which the template writes `placeholder` for. If it writes none in
    results of tools, their images follow them as a user's."""
    text = render(template, chat)
    if text.count(placeholder) < num_images:
        moved = list(_with_images_moved(chat.conversation()))
        return _render(template, chat, moved, chat.offered_tools())
    return text


def _with_images_moved(messages: Sequence[Message]) -> Iterator[Message]:
    images: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            if images:
                yield {"role": "user", "content": images}
            images = []
        elif isinstance(message["content"], list):
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            images = images + [part for part in message["content"] if part["type"] != "text"]
            message = message | {"content": "\n".join(texts)}
        yield message
    if images:
        yield {"role": "user", "content": images}


def _render(template: ChatTemplate, chat: Chat, messages: list[Message], tools: list[dict[str, Any]]) -> str:
    variables = {key: value for key, value in chat.template_variables().items() if key != "messages"}
    if template.knows_tools:
        messages = template.tool_format.for_template(messages)
        variables |= {"tools": tools} if tools else {}
    elif tools or any("tool_calls" in message for message in messages):
        messages = template.tool_format.spelled_out(messages, tools)
    begun = messages[-1]["content"] if chat.continue_final_message else ""
    if not template.takes_strings:
        messages = [_in_parts(message) for message in messages]
    text = template.render(messages, **variables | {"add_generation_prompt": chat.opens_answer()})
    if chat.continue_final_message:  # what the template puts after the last words would end the answer
        last = begun.strip()
        end = text.rfind(last)
        if not last or end < 0:
            raise InvalidRequest("the final message cannot be continued with this template", param="messages")
        text = text[: end + len(last)]
    return text


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def kept_ids(ids: list[int], *, keep_last: int | None, bos_token_id: int | None, param: str) -> list[int]:
    """Cut where the client asked for it, and never empty."""
    if keep_last is not None:
        ids = ids[-keep_last:]
    return ids if ids else [_first_id(bos_token_id, param)]


def num_kept(num_tokens: Sequence[int], *, keep_last: int | None, bos_token_id: int | None, param: str) -> int:
    """Total length of several prompts, as `kept_ids` would leave each of them."""
    if not all(num_tokens):
        _first_id(bos_token_id, param)
    return sum(max(1, num if keep_last is None else min(num, keep_last)) for num in num_tokens)


def _first_id(bos_token_id: int | None, param: str) -> int:
    if bos_token_id is None:
        raise InvalidRequest("the prompt is empty", param=param)
    return bos_token_id

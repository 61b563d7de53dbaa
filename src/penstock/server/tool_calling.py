"""Tool calling: how the calls in an answer are read, and the guide that keeps the model to good ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.api.openai import ChatRequest
from penstock.api.openai.guided import MAX_CHARACTERS, GuideAsked
from penstock.core.errors import InvalidRequest
from penstock.server.served_model import ServedModel
from penstock.text.tools import CallArguments, CallBegun, CallParser, Part, ReasoningText, Text, Tool, ToolFormat


@dataclass(frozen=True)
class ToolCalling:
    format: ToolFormat
    tools: list[Tool]
    is_required: bool  # an answer is calls and nothing else
    max_calls: int | None  # in an answer
    mark_ids: frozenset[int]  # special tokens that are part of a call
    guide: GuideAsked | None

    @classmethod
    def from_chat(cls, chat: ChatRequest, model: ServedModel) -> ToolCalling:
        """The chat may call tools. Nothing is known yet of whether the guide can be followed."""
        template, tokenizer = model.chat_template, model.tokenizer
        known = {mark: tokenizer.special_id(mark) for mark in template.tool_format.marks}
        special = {mark: token_id for mark, token_id in known.items() if token_id is not None}
        max_calls = 1 if chat.parallel_tool_calls is False else None
        tools = [Tool(of.name, of.parameters, of.strict) for of in chat.callable_tools()]
        guide = _guide(chat, template.tool_format, tools, special, max_calls)
        return cls(template.tool_format, tools, chat.must_call(), max_calls, frozenset(special.values()), guide)

    def parser(self) -> CallParser:
        return self.format.parser(self.tools, self.max_calls)


def _guide(
    chat: ChatRequest,
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    special: dict[str, int],
    max_calls: int | None,
) -> GuideAsked | None:
    asked = None if chat.must_call() else chat.guide()
    if asked is not None and asked.guide.kind != "json_schema":
        raise InvalidRequest(f"{asked.param}: only a JSON schema can go with tools", param=asked.param)
    try:
        guide = tool_format.guide(
            tools, special, is_required=chat.must_call(), most=max_calls, otherwise=asked and asked.guide
        )
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply", param="tools") from None
    if guide is not None and len(guide.source) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"tools: their schemas have more than the {MAX_CHARACTERS} characters that can be enforced", param="tools"
        )
    return None if guide is None else GuideAsked(guide, asked.param if asked else "tools")


@dataclass
class WholeCall:
    number: int
    name: str
    arguments: str = ""


Block = Text | ReasoningText | WholeCall


def joined_parts(parts: Iterable[Part]) -> list[Block]:
    """The thoughts, texts and calls that came in parts, each whole."""
    found: list[tuple[Block, list[str]]] = []  # what it is, and its texts: many, and joined once
    for part in parts:
        last = found[-1][0] if found else None
        match part:
            case Text(text) | ReasoningText(text):
                if type(last) is not type(part):
                    found.append((type(part)(""), []))
                found[-1][1].append(text)
            case CallBegun(number, name):
                found.append((WholeCall(number, name), []))
            case CallArguments(_, text) if isinstance(last, WholeCall):
                found[-1][1].append(text)
    wholes = [(block, "".join(texts)) for block, texts in found]
    return [
        replace(block, arguments=text) if isinstance(block, WholeCall) else type(block)(text) for block, text in wholes
    ]

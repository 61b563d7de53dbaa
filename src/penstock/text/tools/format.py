"""Tool format of one family of models: how it is told of tools, what its calls look like, and what keeps it to that.

A family is one instance of `ToolFormat` in a file of its own. Most chat templates tell the model of its tools
themselves; for one that cannot, `spelled_out` says it in a system message, and writes calls and results as plain turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

from penstock.core.guide import Guide
from penstock.text.tools import grammar
from penstock.text.tools.grammar import Shape, Tool
from penstock.text.tools.parser import CallParser, Syntax

Message = dict[str, Any]
_ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ToolFormat:
    name: str
    syntax: Syntax  # what is read
    shape: Shape  # what is written
    instructions: Callable[[str], str]  # from the tools, as JSON, to what a template that cannot tell of them is given
    marks: tuple[str, ...] = ()  # texts that may be special tokens of the model: they are read and not skipped
    id_characters: int | None = None  # of a call's id, if the template insists
    is_alone: bool = False  # a call is a message of its own: no guide says where in an answer one may stand
    # Earlier turns as the template takes them, where it wants them in another form than others; None: as they are.
    retold: Callable[[Sequence[Message]], list[Message]] | None = None

    def parser(self, tools: Sequence[Tool], most: int | None = None) -> CallParser:
        texts = {tool.name: tool.text_arguments() for tool in tools}
        return CallParser(self.syntax, frozenset(tool.name for tool in tools), most, texts)

    def guide(
        self,
        tools: Sequence[Tool],
        special: Mapping[str, int],
        *,
        is_required: bool,
        most: int | None = None,
        otherwise: Guide | None = None,
    ) -> Guide | None:
        """Guide that keeps an answer to good calls; None if none is needed. `special` are the ids of `marks` that are
        tokens, and `otherwise` is what an answer without calls has to follow: a JSON schema."""
        if self.is_alone and not is_required:
            return otherwise  # it is for the text of an answer, and a call has none
        if is_required:
            most = 1 if self.is_alone else most
            return Guide("grammar", grammar.required(self.shape, tools, special, most))
        if otherwise is not None:
            marked = replace(self.shape, mark=self.syntax.mark)  # without one, a call and an answer begin alike
            return Guide("grammar", grammar.instead(marked, tools, special, most, json.loads(otherwise.source)))
        if any(tool.strict for tool in tools):
            return Guide("grammar", grammar.allowed(self.shape, tools, special, most))
        return None

    def call_id(self, prefix: str, *key: object) -> str:
        """The same for the same key, at every replica."""
        digest = blake2b(repr(key).encode(), digest_size=12)
        if self.id_characters is None:
            return prefix + digest.hexdigest()
        return _short(digest.digest(), self.id_characters)

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with ids that the template accepts: those of another server's calls may be longer."""
        if self.retold is not None:
            messages = self.retold(messages)
        return [self._with_short_ids(message) for message in messages] if self.id_characters else list(messages)

    def spelled_out(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Messages for a template that knows no tools: tools, calls and results are spelled out in plain turns."""
        found: list[Message] = []
        if tools:
            listed = self.instructions(json.dumps(list(tools), ensure_ascii=False))
            if messages and messages[0]["role"] == "system":
                listed = f"{messages[0]['content']}\n\n{listed}"
                messages = messages[1:]
            found.append({"role": "system", "content": listed})
        for is_result, turns in groupby(messages, lambda message: message["role"] == "tool"):
            if is_result:
                found.append({"role": "user", "content": _results([message["content"] for message in turns])})
            else:
                found += map(self._without_calls, turns)
        return found

    def _without_calls(self, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        text = "\n".join(filter(None, (message["content"], self.written(message["tool_calls"]))))
        return {"role": "assistant", "content": text}

    def written(self, calls: Sequence[dict[str, Any]]) -> str:
        """Calls of an earlier turn, as the model would have written them."""
        functions = [call["function"] for call in calls]
        return self.shape.written([(of["name"], json.dumps(of["arguments"], ensure_ascii=False)) for of in functions])

    def _with_short_ids(self, message: Message) -> Message:
        found = dict(message)
        if "tool_calls" in found:
            found["tool_calls"] = [call | {"id": self._fit_id(call["id"])} for call in found["tool_calls"]]
        if "tool_call_id" in found:
            found["tool_call_id"] = self._fit_id(found["tool_call_id"])
        return found

    def _fit_id(self, given: str) -> str:
        assert self.id_characters is not None
        if re.fullmatch(f"[A-Za-z0-9]{{{self.id_characters}}}", given):
            return given
        return _short(blake2b(given.encode(errors="replace"), digest_size=12).digest(), self.id_characters)


def _results(contents: Sequence[str | list[Message]]) -> str | list[Message]:
    """Results of tools as a user would tell them; in parts where images are among them."""
    if all(isinstance(content, str) for content in contents):
        return "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents)
    found: list[Message] = []
    for at, content in enumerate(contents):
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        begin = {"type": "text", "text": ("\n" if at else "") + "<tool_response>\n"}
        found += [begin, *parts, {"type": "text", "text": "\n</tool_response>"}]
    return found


def _short(digest: bytes, num_characters: int) -> str:
    number, found = int.from_bytes(digest), []
    for _ in range(num_characters):
        number, at = divmod(number, len(_ALPHANUMERIC))
        found.append(_ALPHANUMERIC[at])
    return "".join(found)

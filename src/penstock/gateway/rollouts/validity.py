"""Whether an answer is what its request asked for: JSON of a schema, one of some choices, calls of the tools it named.

A guided engine cannot give anything else, and so an answer that fails is a fault of the version: a guide that is not
applied, a template that breaks tool calls, a parser that does not know the model's form. Answers that were cut off at
their limit of tokens are nobody's fault. Nothing is said of grammars and regular expressions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.rollout import Metric
from penstock.gateway.rollouts.answers import Answer, Call
from penstock.gateway.rollouts.json_schema import TooMuchWork, accepts

_ERRORS = (ValueError, RecursionError)  # msgspec's are ValueErrors


class Asked:
    """Demands of a request on its answer. Reads a body; never raises."""

    def __init__(self, body: bytes) -> None:
        try:
            found = msgspec.json.decode(body)
        except _ERRORS:
            found = None
        self._body: dict[str, Any] = found if isinstance(found, dict) else {}

    def faults(self, answer: Answer) -> list[tuple[Metric, float]]:
        """For each thing that can be checked: 1, it is not what was asked for, or 0."""
        if answer.is_cut_off:
            return []
        checked = ((Metric.INVALID_GUIDED, self._guided), (Metric.INVALID_TOOLS, self._tools))
        found = []
        for metric, check in checked:
            try:
                is_valid = check(answer)
            except (TooMuchWork, AttributeError, TypeError, LookupError):
                continue
            if is_valid is not None:
                found.append((metric, float(not is_valid)))
        return found

    def _guided(self, answer: Answer) -> bool | None:
        """None: it asks for nothing that could be checked, or the model called a tool instead."""
        if answer.calls:
            return None
        wanted = self._body.get("structured_outputs") or {}
        if choice := wanted.get("choice") or self._body.get("guided_choice"):
            return answer.text in choice
        schema = wanted.get("json") or self._body.get("guided_json")
        given = self._body.get("response_format") or (self._body.get("text") or {}).get("format") or {}
        kind = given.get("type")
        if schema is None and kind == "json_schema":
            schema = (given.get("json_schema") or given).get("schema")
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        if schema is None and kind != "json_object" and not wanted.get("json_object"):
            return None
        try:
            document = msgspec.json.decode(answer.text)
        except _ERRORS:
            return False
        return isinstance(document, dict) if schema is None else accepts(schema, document)

    def _tools(self, answer: Answer) -> bool | None:
        """None: no tool was called, and none had to be."""
        tools = self._body.get("tools")
        if not tools:
            return None
        if not answer.calls:
            choice = self._body.get("tool_choice")
            kind = choice.get("type") if isinstance(choice, dict) else choice
            return None if kind in (None, "auto", "none") else False
        schemas = dict(map(_tool, tools))
        return all(_is_valid(call, schemas) for call in answer.calls)


def _tool(tool: dict[str, Any]) -> tuple[str, object]:
    """Name and schema, as OpenAI's chats, its responses or Anthropic have them."""
    function = tool.get("function") or tool
    return function["name"], function.get("parameters") or function.get("input_schema") or True


def _is_valid(call: Call, schemas: dict[str, object]) -> bool:
    if call.name not in schemas:
        return False
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except _ERRORS:
        return False
    return accepts(schemas[call.name], arguments)

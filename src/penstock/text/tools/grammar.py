"""Grammars of calls, in Lark's language as `core.guide` has it: what an answer must look like so that its calls are of
tools on offer and their arguments follow the tools' schemas.

A mark that is one token of the model is written by its id, because its text spelled out would be other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function on offer."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema of its arguments; None: it has none
    strict: bool | None = None  # None: nothing was said

    def text_arguments(self) -> frozenset[str]:
        """Arguments that are texts and can be nothing else."""
        properties = (self.parameters or {}).get("properties")
        if not isinstance(properties, dict):
            return frozenset()
        return frozenset(name for name, of in properties.items() if isinstance(of, dict) and of.get("type") == "string")

    def schema(self) -> dict[str, Any]:
        """Schema of the arguments as the model is made to write them: on one line, as models are trained to. Keywords
        that the grammar cannot express are let go, unless the tool is strict: then it is refused."""
        if self.strict is False:
            found: dict[str, Any] = {"type": "object"}
        else:
            found = _closed(self.parameters or {"properties": {}})
            found.setdefault("type", "object")
        return found | {"x-guidance": _ONE_LINE | ({} if self.strict else {"lenient": True})}


@dataclass(frozen=True)
class Shape:
    """Spelling of calls, to the letter."""

    mark: str  # what opens them; empty: nothing does
    opening: str = ""
    separator: str | None = None  # None: one call for every mark
    closing: str = ""
    gap: str = "\n"  # before the next mark
    call: tuple[str, str, str] = ('{"name": "', '", "arguments": ', "}")  # around name and arguments

    def block(self, special: Mapping[str, int], most: int | None) -> str:
        """The rule of calls that are opened together, but for their mark."""
        more = "" if most == 1 or self.separator is None else f" ({literal(self.separator, special)} call)*"
        return " ".join(filter(None, (literal(self.opening, special), "call" + more, literal(self.closing, special))))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Names with their arguments."""
        before, after_name, after = self.call
        texts = [f"{before}{name}{after_name}{arguments}{after}" for name, arguments in calls]
        blocks = texts if self.separator is None else [self.separator.join(texts)]
        return self.gap.join(f"{self.mark}{self.opening}{block}{self.closing}" for block in blocks)


def required(shape: Shape, tools: Sequence[Tool], special: Mapping[str, int], most: int | None) -> str:
    """Calls and nothing else."""
    start = "block" if most == 1 or shape.separator is not None else f"block ({literal(shape.gap, special)} block)*"
    block = f"block: {literal(shape.mark, special)} {shape.block(special, most)}"
    return "\n".join([f"start: {start}", block, *_calls(shape, tools, special)])


def allowed(shape: Shape, tools: Sequence[Tool], special: Mapping[str, int], most: int | None) -> str:
    """Any text, with calls in it."""
    if not shape.mark:
        lines = [f"start: {shape.block(special, most)} | TEXT?", "TEXT: /[^{](.|\\n)*/"]
    elif shape.mark in special:
        lines = [f"start: (TEXT? {literal(shape.mark, special)} {shape.block(special, most)})* TEXT?", _TEXT]
    else:
        lines = [f"start: (head {shape.block(special, most)})* TEXT", _TEXT]
        lines.append(f"head[lazy]: TEXT {literal(shape.mark, special)}")
    return "\n".join([*lines, *_calls(shape, tools, special)])


def instead(shape: Shape, tools: Sequence[Tool], special: Mapping[str, int], most: int | None, schema: Any) -> str:
    """Calls, or else an answer that follows a JSON schema."""
    first, *others = required(shape, tools, special, most).split("\n")
    schema = schema | {"x-guidance": _ONE_LINE} if isinstance(schema, dict) else {"x-guidance": _ONE_LINE}
    return "\n".join([f"{first} | answer", *others, f"answer: %json {json.dumps(schema)}"])


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text, with what is a token by itself as that token."""
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text) if marks else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


_TEXT = "TEXT: /(.|\\n)*/"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _calls(shape: Shape, tools: Sequence[Tool], special: Mapping[str, int]) -> list[str]:
    lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    before, after_name, after = shape.call
    for index, tool in enumerate(tools):
        head = literal(f"{before}{tool.name}{after_name}", special)
        lines.append(f"call_{index}: {head} arguments_{index} {literal(after, special)}")
        lines.append(f"arguments_{index}: %json {json.dumps(tool.schema())}")
    return lines


_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties")


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without properties that it does not name, unless it speaks of them: a model that is made to call
    would invent some."""
    found = dict(schema)
    if isinstance(properties := found.get("properties"), dict):
        found["properties"] = {name: _closed(of) if isinstance(of, dict) else of for name, of in properties.items()}
        if "additionalProperties" not in found and not any(word in found for word in _COMBINED):
            found["additionalProperties"] = False
    if isinstance(items := found.get("items"), dict):
        found["items"] = _closed(items)
    return found

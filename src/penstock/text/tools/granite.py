"""Granite 3: all calls in one JSON list behind a mark. (Granite 4 calls as Hermes does.)

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.parser import Syntax

MARK = "<|tool_call|>"


def _instructions(tools: str) -> str:
    return f"""You have access to these tools:
{tools}

When one is needed, answer with {MARK} and a JSON list of calls, and nothing else:
{MARK}[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]
Answer in plain words when no tool is needed."""


GRANITE = ToolFormat(
    name="granite",
    syntax=Syntax(MARK),
    shape=Shape(MARK, opening="[", separator=", ", closing="]"),
    instructions=_instructions,
    marks=(MARK,),
)

"""Mistral: a JSON list after its mark, or, since 2025, a mark for every call with the name before the arguments.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

Its templates take ids of nine letters and digits only.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.other_calls import NamedCall
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""You can call these functions:
{tools}

To call some, answer with [TOOL_CALLS] and a JSON list of their names and arguments:
[TOOL_CALLS][{{"name": "function_name", "arguments": {{"argument": "value"}}}}]
Answer in plain words when no function is needed."""


MISTRAL = ToolFormat(
    name="mistral",
    syntax=Syntax("[TOOL_CALLS]", unquoted=NamedCall),
    shape=Shape("[TOOL_CALLS]", opening="[", separator=", ", closing="]"),
    instructions=_instructions,
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_characters=9,
)

MISTRAL_V11 = replace(MISTRAL, name="mistral_v11", shape=Shape("[TOOL_CALLS]", gap="", call=("", "[ARGS]", "")))

"""Hermes, and Qwen 2.5 and 3 after it: every call is a JSON object between tags of its own.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

It is also what a model is taught whose chat template knows no tools and whose family has no format here.
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""You can call functions to help with the user's request. These are available:
<tools>
{tools}
</tools>

To call one, answer with a JSON object that has its name and its arguments, between <tool_call> tags:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
Call several by writing several such blocks. Each result comes back between <tool_response> tags. Answer in plain words
when no function is needed."""


HERMES = ToolFormat(
    name="hermes",
    syntax=Syntax("<tool_call>", close="</tool_call>"),
    shape=Shape("<tool_call>", opening="\n", closing="\n</tool_call>"),
    instructions=_instructions,
    marks=("<tool_call>", "</tool_call>"),
)

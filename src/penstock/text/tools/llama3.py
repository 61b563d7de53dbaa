"""Llama 3.1 to 3.3: the answer is the call, with or without `<|python_tag|>` before it.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}
    <|python_tag|>brave_search.call(query="weather in Paris")

An object without the tag is a call only if its name is a tool's: it could be an answer in JSON.
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.json_scan import SPACE
from penstock.text.tools.other_calls import PythonText
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""You have access to the following functions:
{tools}

To call one, answer with nothing but JSON in this form; do not use variables:
{{"name": "function_name", "parameters": {{"argument": "value"}}}}
Answer in plain words when no function is needed."""


LLAMA3 = ToolFormat(
    name="llama3",
    syntax=Syntax("<|python_tag|>", between=SPACE + ";,]", is_bare=True, unquoted=PythonText),
    shape=Shape("", separator="; ", call=('{"name": "', '", "parameters": ', "}")),
    instructions=_instructions,
    marks=("<|python_tag|>",),
)

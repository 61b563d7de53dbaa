"""Kimi-K2: every call between marks of its own, with a number behind the name, and all of them between two more.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.marked_call import MarkedCall
from penstock.text.tools.parser import Syntax

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiCall(MarkedCall):
    head = re.compile(rf"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*{re.escape(_ARGUMENTS)}\s*")
    close = _END


def _instructions(tools: str) -> str:
    return f"""## Tools
{tools}

To call one, answer in this form:
{OPEN}{_CALL}functions.function_name:0{_ARGUMENTS}{{"argument": "value"}}{_END}{CLOSE}
Answer in plain words when no tool is needed."""


KIMI = ToolFormat(
    name="kimi",
    syntax=Syntax(OPEN, close=CLOSE, each=_CALL, unquoted=KimiCall),
    shape=Shape(OPEN, separator="", closing=CLOSE, call=(f"{_CALL}functions.", f":0{_ARGUMENTS}", _END)),
    instructions=_instructions,
    marks=(OPEN, CLOSE, _CALL, _ARGUMENTS, _END),
)

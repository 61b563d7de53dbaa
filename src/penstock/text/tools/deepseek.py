"""DeepSeek: every call between marks of its own, and all of them between two more. R1 and V3 say `function` and fence
the arguments, V3.1 has the name and the arguments alone; both are read in either format.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from dataclasses import replace

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.json_scan import SPACE
from penstock.text.tools.marked_call import MarkedCall
from penstock.text.tools.parser import Syntax

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekCall(MarkedCall):
    head = re.compile(rf"\s*(?:\w+{_SEPARATOR}([\w.-]+)\s*```(?:json)?|([\w.-]+)\s*{_SEPARATOR})\s*")
    close = _END
    closing_space = SPACE + "`"


def _instructions(tools: str) -> str:
    return f"""## Tools
You have access to the following tools:
{tools}

To call one, answer in this form, and nothing behind it:
{OPEN}{_CALL}function_name{_SEPARATOR}{{"argument": "value"}}{_END}{CLOSE}
Several calls follow each other before {CLOSE}. Answer in plain words when no tool is needed."""


DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    syntax=Syntax(OPEN, close=CLOSE, each=_CALL, unquoted=DeepSeekCall),
    shape=Shape(OPEN, separator="", closing=CLOSE, call=(_CALL, _SEPARATOR, _END)),
    instructions=_instructions,
    marks=(OPEN, CLOSE, _CALL, _SEPARATOR, _END),
)


def _fenced_instructions(tools: str) -> str:
    form = f"{_CALL}function{_SEPARATOR}function_name\n```json\n" + '{"argument": "value"}\n```' + _END
    return _instructions(tools).replace(f'{_CALL}function_name{_SEPARATOR}{{"argument": "value"}}{_END}', form)


DEEPSEEK = replace(
    DEEPSEEK_V31,
    name="deepseek",
    shape=Shape(
        OPEN,
        separator="\n",
        closing=CLOSE,
        call=(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_END}"),
    ),
    instructions=_fenced_instructions,
)

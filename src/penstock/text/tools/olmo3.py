"""OLMo 3: Python's calls, one on a line, between marks.

    <function_calls>
    get_weather(city="Paris")
    get_time()
    </function_calls>

Calls that are enforced are JSON objects between the same marks: these are read too.
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.other_calls import PythonBlock
from penstock.text.tools.parser import Syntax

OPEN, CLOSE = "<function_calls>", "</function_calls>"


class OlmoCalls(PythonBlock):
    close = CLOSE


def _instructions(tools: str) -> str:
    return f"""You can call these functions:
<functions>{tools}</functions>

To call some, answer with one call on each line, arguments by name:
{OPEN}
function_name(argument="value")
{CLOSE}
Answer in plain words when no function is needed."""


OLMO3 = ToolFormat(
    name="olmo3",
    syntax=Syntax(OPEN, close=CLOSE, unquoted=OlmoCalls),
    shape=Shape(OPEN, opening="\n", separator="\n", closing=f"\n{CLOSE}"),
    instructions=_instructions,
    marks=(OPEN, CLOSE),
)

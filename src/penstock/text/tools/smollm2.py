"""SmolLM2: all calls in one JSON list between tags. Its template knows no tools; it was trained with this system
message, which its model card gives, and says an empty list where no function fits.

    <tool_call>[
    {"name": "get_weather", "arguments": {"city": "Paris"}},
    {"name": "get_time", "arguments": {}}
    ]</tool_call>
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, \
please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
(more tool calls as required)
]</tool_call>"""


SMOLLM2 = ToolFormat(
    name="smollm2",
    syntax=Syntax("<tool_call>", close="</tool_call>"),
    shape=Shape("<tool_call>", opening="[\n", separator=",\n", closing="\n]</tool_call>"),
    instructions=_instructions,
    marks=("<tool_call>", "</tool_call>"),
)

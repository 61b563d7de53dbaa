"""Harmony, gpt-oss' format: a call is a message to a function, and ends the answer. Its messages are told apart by
`text.reasoning.harmony`, which finds the calls too.

    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

from __future__ import annotations

from penstock.text.tools.format import ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""# Tools

## functions

Call them in the commentary channel, by a message to functions.NAME with the arguments as JSON:
{tools}"""


HARMONY = ToolFormat(
    name="harmony",
    syntax=Syntax("<|channel|>commentary to=functions."),
    shape=Shape("", call=("", " <|constrain|>json<|message|>", "")),  # after `to=functions.`, which is not chosen
    instructions=_instructions,
    marks=("<|constrain|>", "<|message|>", "<|channel|>"),
    is_alone=True,
)

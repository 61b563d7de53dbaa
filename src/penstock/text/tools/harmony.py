"""Harmony, gpt-oss' format: a call is a message to a function, and ends the answer. Its messages are told apart by
`text.reasoning.harmony`, which finds the calls too.

    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.text.tools.format import Message, ToolFormat
from penstock.text.tools.grammar import Shape
from penstock.text.tools.parser import Syntax


def _instructions(tools: str) -> str:
    return f"""# Tools

## functions

Call them in the commentary channel, by a message to functions.NAME with the arguments as JSON:
{tools}"""


def _retold(messages: Sequence[Message]) -> list[Message]:
    """The messages as gpt-oss' template takes them. It reads thoughts under the name `thinking`, and before a call
    either these or a text. It renders only the first of a message's calls, and takes the result behind it for that
    one's."""
    found: list[Message] = []
    left = list(messages)
    while left:
        message = dict(left.pop(0))
        thoughts, calls = message.get("reasoning_content"), message.get("tool_calls")
        if calls:
            thoughts, message["content"] = "\n".join(filter(None, (thoughts, message["content"]))), ""
        if thoughts:
            message["thinking"] = thoughts
        if not calls:
            found.append(message)
            continue
        num_results = next((i for i, each in enumerate(left) if each["role"] != "tool"), len(left))
        results, left = left[:num_results], left[num_results:]
        for call in calls:
            own = [each for each in results if each.get("tool_call_id") == call["id"]]
            found += [message | {"tool_calls": [call]}, *own]
            results = [each for each in results if each not in own]
            message.pop("thinking", None)
        found += results  # of nobody's calls
    return found


HARMONY = ToolFormat(
    name="harmony",
    syntax=Syntax("<|channel|>commentary to=functions."),
    shape=Shape("", call=("", " <|constrain|>json<|message|>", "")),  # after `to=functions.`, which is not chosen
    instructions=_instructions,
    marks=("<|constrain|>", "<|message|>", "<|channel|>"),
    is_alone=True,
    retold=_retold,
)

"""GLM-4.5 to 4.7: a call's name, and its arguments as keys and values between tags of their own.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

A call that is enforced is written as Hermes writes it, a JSON object between the same tags: that is read too.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.text.tools.hermes import HERMES
from penstock.text.tools.other_calls import KeyedCall

GLM = replace(
    HERMES,
    name="glm",
    syntax=replace(HERMES.syntax, unquoted=KeyedCall),
    marks=(*HERMES.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

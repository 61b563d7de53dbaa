"""Llama 4: calls as Llama 3 writes them, behind another mark, or a list of Python's calls as the whole answer.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|python_end|>
    [get_weather(city="Paris"), get_time()]

An object or a list without the mark is a call only if its names are tools': it could be an answer.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.text.tools.llama3 import LLAMA3

# The mark that closes a call is a special token, which is left out of texts like the one that ends an answer.
LLAMA4 = replace(
    LLAMA3,
    name="llama4",
    syntax=replace(LLAMA3.syntax, mark="<|python_start|>", has_bare_lists=True),
    marks=("<|python_start|>",),
)

"""A chat template of the shape of gpt-oss' own, and a tokenizer with its special tokens: the real ones are not here."""

from __future__ import annotations

from penstock.text.reasoning.harmony import MARKS
from penstock.text.tokenizer import Tokenizer
from tests.text import small

# Thoughts are told where calls follow them and no answer has ended their turn; each message has one call, whose
# arguments are an object; a result has the name of the last call; an answer that ends the conversation is closed by
# another token.
GPT_OSS = """{{- "<|start|>system<|message|>You are a model.\\nReasoning: " + (reasoning_effort or "medium") }}
{{- "\\n\\n# Valid channels: analysis, commentary, final." }}
{%- if tools %}{{ "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{{- "<|end|>" }}
{%- if messages[0].role in ("developer", "system") %}
    {%- set developer, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set developer, turns = "", messages %}
{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" + ("# Instructions\\n\\n" + developer if developer else "") }}
    {%- for tool in tools or () %}{{ "\\n# Tool " + tool.function.name }}{% endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" and "<|channel|>" in message.content %}
        {{- raise_exception("a channel in the content") }}
    {%- elif message.role == "assistant" and "tool_calls" in message %}
        {%- if message.content and message.thinking %}{{ raise_exception("both content and thinking") }}{% endif %}
        {%- set later = namespace(answered=false) %}
        {%- for other in turns[loop.index:] %}
            {%- if other.role == "assistant" and "tool_calls" not in other %}{% set later.answered = true %}{% endif %}
        {%- endfor %}
        {%- set thoughts = message.content or message.thinking %}
        {%- if thoughts and not later.answered %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + thoughts + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{ raise_exception("a result of no call") }}{% endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


def tokenizer() -> Tokenizer:
    return small.load(small.byte_level(special=list(MARKS)))

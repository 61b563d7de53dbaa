"""Tool calls as text: one format for each family of models, and the parts that an answer is told in."""

from __future__ import annotations

from penstock.text.tools import deepseek, granite, kimi, olmo3
from penstock.text.tools.deepseek import DEEPSEEK, DEEPSEEK_V31
from penstock.text.tools.format import ToolFormat
from penstock.text.tools.glm import GLM
from penstock.text.tools.grammar import Tool
from penstock.text.tools.granite import GRANITE
from penstock.text.tools.harmony import HARMONY
from penstock.text.tools.hermes import HERMES
from penstock.text.tools.kimi import KIMI
from penstock.text.tools.llama3 import LLAMA3
from penstock.text.tools.llama4 import LLAMA4
from penstock.text.tools.mistral import MISTRAL, MISTRAL_V11
from penstock.text.tools.olmo3 import OLMO3
from penstock.text.tools.parser import CallParser
from penstock.text.tools.parts import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text
from penstock.text.tools.smollm2 import SMOLLM2

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "CallParser",
    "Part",
    "ReasoningText",
    "Text",
    "Tool",
    "ToolFormat",
    "choose",
]

_KNOWN = (
    DEEPSEEK,
    DEEPSEEK_V31,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    MISTRAL_V11,
    OLMO3,
    SMOLLM2,
)
FORMATS = {known.name: known for known in _KNOWN}


def choose(template: str, name: str | None = None) -> ToolFormat:
    """Format by name, or else by what the chat template gives away of its family."""
    if name in FORMATS:  # a gateway may be older than its replica
        return FORMATS[name]
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if deepseek.OPEN in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_V31
    if kimi.OPEN in template:
        return KIMI
    if "[TOOL_CALLS]" in template:
        return MISTRAL_V11 if "[ARGS]" in template else MISTRAL
    if granite.MARK in template:
        return GRANITE
    if olmo3.OPEN in template:
        return OLMO3
    if "<tool_call>" in template:
        return GLM if "<arg_key>" in template else HERMES
    if "<|header_start|>" in template:
        return LLAMA4
    if "<|start_header_id|>" in template:
        return LLAMA3
    return SMOLLM2 if "SmolLM" in template else HERMES

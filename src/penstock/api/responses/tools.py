"""Tools as the Responses API has them: functions, told flat. Tools of any other type are run by OpenAI's servers, or by
a client that offers them to every server: they are skipped, and the model is told nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.api import openai
from penstock.api.decoding import Refused, WireStruct
from penstock.api.openai.tools import FunctionDefinition, FunctionName, NamedTool, ToolDefinition, ToolName
from penstock.core.errors import UnsupportedParameter


class Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None

    def __post_init__(self) -> None:
        if not self.is_function:
            return
        if self.name is None:
            raise Refused("name", "is required")
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise Refused("parameters", "must be a JSON schema of type 'object'")

    @property
    def is_function(self) -> bool:
        return self.type == "function"

    def to_chat(self) -> ToolDefinition:
        function = FunctionDefinition(
            name=self.name or "", description=self.description, parameters=self.parameters, strict=self.strict
        )
        return ToolDefinition(type="function", function=function)

    def to_wire(self) -> dict[str, Any]:
        """The tool as a response repeats it, with every member that clients expect."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class AllowedTool(WireStruct):
    type: str
    name: str | None = None
    server_label: str | None = None


class ToolSelection(WireStruct):
    """One function that must be called, or those among the tools that may."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None

    def __post_init__(self) -> None:
        if self.type not in ("function", "allowed_tools"):
            raise Refused(
                "type", "only 'function' and 'allowed_tools' can be chosen at this server", UnsupportedParameter
            )
        if self.type == "function" and self.name is None:
            raise Refused("name", "is required")
        if self.type == "allowed_tools" and not (self.mode and self.tools):
            raise Refused("tools" if self.mode else "mode", "is required")


ToolChoice = Literal["none", "auto", "required"] | ToolSelection


class Offer(msgspec.Struct):
    """Tools and the choice among them, in the words of a chat."""

    tools: list[ToolDefinition]
    choice: openai.ToolChoice | None


def offer_of(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Offer:
    functions = [tool for tool in tools or () if tool.is_function]
    if not isinstance(choice, ToolSelection):
        return Offer([tool.to_chat() for tool in functions], choice)
    if choice.type == "function":
        named = NamedTool(type="function", function=FunctionName(name=choice.name or ""))
        return Offer([tool.to_chat() for tool in functions], named)
    allowed = {tool.name for tool in choice.tools or () if tool.type == "function"}
    if missing := sorted(str(name) for name in allowed - {tool.name for tool in functions}):
        raise Refused("tool_choice", f"none of the tools is named '{missing[0][:128]}'")
    return Offer([tool.to_chat() for tool in functions if tool.name in allowed], choice.mode)

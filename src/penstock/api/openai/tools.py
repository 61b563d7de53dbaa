"""Tools as OpenAI's clients offer them, and calls as they are sent back. It has never seen a model's own format.

Old clients' `functions` are refused where they appear: their answers have another form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, WireStruct
from penstock.core.errors import UnsupportedParameter

MAX_TOOLS = 512  # OpenAI allows 128; an agent with a few servers of tools has more

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(WireStruct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise Refused("parameters", "must be a JSON schema of type 'object'")

    def to_template(self) -> dict[str, Any]:
        """Function as chat templates take it; some read the parameters without asking whether there are any."""
        found: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            found["description"] = self.description
        return found | {"parameters": self.parameters or {"type": "object", "properties": {}}}


class ToolDefinition(WireStruct):
    type: str
    function: FunctionDefinition | None = None
    custom: Any = None

    def __post_init__(self) -> None:
        _check_type(self.type)
        if self.function is None:
            raise Refused("function", "is required")

    def definition(self) -> FunctionDefinition:
        assert self.function is not None
        return self.function


class FunctionName(WireStruct):
    name: str


class NamedTool(WireStruct):
    """The one tool that must be called."""

    type: str
    function: FunctionName | None = None
    custom: Any = None
    allowed_tools: Any = None

    def __post_init__(self) -> None:
        _check_type(self.type)
        if self.function is None:
            raise Refused("function", "is required")


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(WireStruct):
    name: str
    arguments: str

    def to_template(self) -> dict[str, Any]:
        """Templates write the arguments themselves. Arguments that are no JSON stay what they are: the model is to see
        what it wrote."""
        try:
            arguments = msgspec.json.decode(self.arguments) if self.arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(WireStruct):
    """Call of a tool as the model made it in an earlier turn."""

    id: str
    function: FunctionCall | None = None
    type: str = "function"
    index: int | None = None  # clients that put a call together from chunks may leave it there
    custom: Any = None

    def __post_init__(self) -> None:
        _check_type(self.type)
        if self.function is None:
            raise Refused("function", "is required")

    def to_template(self) -> dict[str, Any]:
        assert self.function is not None
        return {"id": self.id, "type": "function", "function": self.function.to_template()}


def check_offer(tools: Sequence[ToolDefinition] | None, choice: ToolChoice | None) -> None:
    names = [tool.definition().name for tool in tools or ()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused("tools", f"two of them are named '{twice}'")
    if not names and choice not in (None, "none", "auto"):
        raise Refused("tool_choice", "is only allowed when tools are given")
    if isinstance(choice, NamedTool) and choice.function is not None and choice.function.name not in names:
        raise Refused("tool_choice", f"none of the tools is named '{choice.function.name[:128]}'")


def _check_type(kind: str) -> None:
    if kind != "function":
        raise Refused("type", "only tools of type 'function' are supported by this server", UnsupportedParameter)

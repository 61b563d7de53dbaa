"""Tools as Anthropic's clients offer them. They say nothing that OpenAI's cannot, so they become theirs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from penstock.api import openai
from penstock.api.anthropic.caching import CacheControl
from penstock.api.decoding import NotBuilt, Refused, WireStruct
from penstock.api.openai.tools import FunctionDefinition, FunctionName, NamedTool, ToolDefinition, ToolName
from penstock.core.errors import UnsupportedParameter


class Tool(WireStruct):
    name: ToolName
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always sent as they come

    allowed_callers: Annotated[Any, NotBuilt(["direct"])] = None
    defer_loading: Annotated[Any, NotBuilt(False)] = None
    input_examples: Annotated[Any, NotBuilt([])] = None

    def __post_init__(self) -> None:
        if self.type not in (None, "custom"):
            raise Refused("type", "only tools of the client's own are supported by this server", UnsupportedParameter)
        super().__post_init__()
        if self.input_schema is None:
            raise Refused("input_schema", "is required")
        if self.input_schema.get("type", "object") != "object":
            raise Refused("input_schema", "must be a JSON schema of type 'object'")

    def to_openai(self) -> ToolDefinition:
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return ToolDefinition(type="function", function=function)


class ToolChoice(WireStruct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise Refused("name", "is required when type is tool")
        if self.type != "tool" and self.name is not None:
            raise Refused("name", "is only allowed when type is tool")

    def to_openai(self) -> openai.ToolChoice:
        match self.type:
            case "tool":
                return NamedTool(type="function", function=FunctionName(name=self.name or ""))
            case "any":
                return "required"
            case "none":
                return "none"
            case _:
                return "auto"

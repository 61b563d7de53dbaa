"""Guided output as Anthropic's clients ask for it: `output_config.format`; older ones `output_format`."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.api.decoding import WireStruct
from penstock.api.openai.guided import GuideAsked, JsonSchema, ResponseFormat, read_schema
from penstock.api.openai.reasoning import ReasoningEffort


class OutputFormat(WireStruct):
    type: Literal["json_schema"]
    schema: msgspec.Raw

    def to_openai(self) -> ResponseFormat:
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=self.schema))


class OutputConfig(WireStruct):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


def guide_of(asked: OutputFormat | None, param: str) -> GuideAsked | None:
    return None if asked is None else GuideAsked(read_schema(asked.schema), param)

"""Guided output as clients ask for it: OpenAI's response_format and what other servers' clients are used to.

All of it comes down to one `Guide`. The content of a schema or a grammar is not looked at here: a hostile one must not
cost the event loop a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.api.decoding import NotBuilt, Refused, WireStruct
from penstock.core.guide import Guide

MAX_CHARACTERS = 128 << 10

Source = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=4096)]


NULL = msgspec.Raw(b"null")  # said nothing; a raw field knows no None


class GuideAsked(NamedTuple):
    guide: Guide
    param: str  # the field that asks for it


def find_guide(request: object, forms: Mapping[str, Callable[[Any], Guide | None]]) -> GuideAsked | None:
    """Guide that the fields of a request ask for, each read in its own way. More than one is refused."""
    found: GuideAsked | None = None
    for name, read in forms.items():
        value = getattr(request, name)
        if value is None or value == NULL:
            continue
        try:
            guide = read(value)
        except ValueError as problem:
            raise Refused(name, str(problem)) from None
        if guide is None:
            continue
        if found is not None:
            raise Refused(name, f"cannot go with {found.param}: an answer has one guide")
        found = GuideAsked(guide, name)
    return found


def read_schema(raw: msgspec.Raw) -> Guide:
    """A schema as it stands in the request; or as a string of JSON, as some clients send it."""
    text = _read_text(raw)
    if not text.lstrip().startswith(("{", "true", "false")):
        raise ValueError("expected a JSON schema: an object, true or false")
    return Guide("json_schema", text)


def _read_text(raw: msgspec.Raw) -> str:
    data = bytes(raw)
    try:
        text = msgspec.json.decode(data, type=str) if data[:1] == b'"' else data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("it is not UTF-8") from None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters")
    return text


def read_choice(texts: list[str]) -> Guide:
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise ValueError(f"must have at most {MAX_CHARACTERS} characters together")
    return Guide.choice(texts)


def read_regex(text: str) -> Guide:
    return Guide("regex", text)


def read_grammar(text: str) -> Guide:
    return Guide("grammar", text)


class JsonSchema(WireStruct):
    """OpenAI is less strict with one that is not `strict`; here it makes no difference."""

    name: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None

    def guide(self) -> Guide:
        return Guide.json_object() if self.schema == NULL else read_schema(self.schema)


# Fields that say what an answer of a type looks like. Beside another type they would be ignored, so they are refused.
_FIELDS_OF_TYPE = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema",),
    "json": ("value",),
    "regex": ("value",),
    "grammar": ("grammar",),
}


class ResponseFormat(WireStruct):
    """`schema` beside json_object is llama.cpp's and Together's way, `value` is TGI's, there and with its own types;
    `grammar` is Fireworks'."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = NULL
    value: msgspec.Raw = NULL
    grammar: Source | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = _FIELDS_OF_TYPE[self.type]
        given = [
            name for name in ("json_schema", "schema", "value", "grammar") if getattr(self, name) not in (None, NULL)
        ]
        for name in given:
            if name not in allowed:
                raise Refused(name, f"cannot go with the type {self.type}")
        if len(given) > 1:
            raise Refused(given[1], f"cannot go with {given[0]}: an answer has one schema")
        if len(allowed) == 1 and not given:
            raise Refused(allowed[0], f"is required when type is {self.type}")

    def guide(self) -> Guide | None:
        match self.type:
            case "json_schema" if self.json_schema is not None:
                return self.json_schema.guide()
            case "json_object":
                schema = self.value if self.schema == NULL else self.schema
                return Guide.json_object() if schema == NULL else read_schema(schema)
            case "json":
                return read_schema(self.value)
            case "regex":
                return read_regex(_read_text(self.value))
            case "grammar" if self.grammar is not None:
                return read_grammar(self.grammar)
        return None


class StructuredOutputs(WireStruct):
    """vLLM's."""

    json: msgspec.Raw = NULL
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is none
    disable_any_whitespace: Annotated[bool | None, NotBuilt(False)] = None
    disable_additional_properties: Annotated[bool | None, NotBuilt(False)] = None
    whitespace_pattern: Annotated[Any, NotBuilt()] = None
    structural_tag: Annotated[Any, NotBuilt()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_guide(self, _STRUCTURED) is None:
            raise Refused("", f"one of {', '.join(_STRUCTURED)} is required")

    def guide(self) -> Guide | None:
        asked = find_guide(self, _STRUCTURED)
        return asked.guide if asked is not None else None


_STRUCTURED: dict[str, Callable[[Any], Guide | None]] = {
    "json": read_schema,
    "regex": read_regex,
    "choice": read_choice,
    "grammar": read_grammar,
    "json_object": lambda wanted: Guide.json_object() if wanted else None,
}
# The fields of a request: OpenAI's, vLLM's new and old ones, and SGLang's.
FORMS: dict[str, Callable[[Any], Guide | None]] = {
    "response_format": ResponseFormat.guide,
    "structured_outputs": StructuredOutputs.guide,
    "guided_json": read_schema,
    "guided_regex": read_regex,
    "guided_choice": read_choice,
    "guided_grammar": read_grammar,
    "json_schema": read_schema,
    "regex": read_regex,
    "ebnf": read_grammar,
}

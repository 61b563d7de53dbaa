"""Types of the edges between steps, which of them fit where, and whether a value is of one.

JSON is typed by a schema. Of that these words are looked at: type, enum, const, properties, required,
additionalProperties: false, items, minimum, maximum, minItems, maxItems, minLength, maxLength, anyOf; any other is for
the model's server to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.converter import Converter
from penstock.core.errors import ConfigError

Schema = Mapping[str, Any]
_MAX_DEPTH = 64  # of a schema
MAX_NESTING = 64  # of a JSON value
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class Type:
    """The type of an edge."""


@dataclass(frozen=True)
class Text(Type):
    among: tuple[str, ...] = ()  # it is one of these; empty: any text

    def __str__(self) -> str:
        return "text"


@dataclass(frozen=True)
class Labels(Type):
    """The outcome of a classification: the likeliest label, and a score for each."""

    names: tuple[str, ...] = ()  # empty: not known before

    def __str__(self) -> str:
        return f"labels ({', '.join(self.names)})" if self.names else "labels"


@dataclass(frozen=True)
class Vector(Type):
    def __str__(self) -> str:
        return "vector"


@dataclass(frozen=True)
class Messages(Type):
    """A conversation, as chats have it."""

    def __str__(self) -> str:
        return "messages"


@dataclass(frozen=True)
class ListOf(Type):
    of: Type

    def __str__(self) -> str:
        return f"list of {self.of}"


@dataclass(frozen=True, eq=False)
class Json(Type):
    """JSON by a schema; an empty one: any."""

    schema: Schema

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Json) and self.schema == other.schema

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self.schema, order="deterministic"))

    def __str__(self) -> str:
        kind = self.schema.get("type")
        return f"json ({kind})" if isinstance(kind, str) else "json"


@dataclass(frozen=True)
class Record(Type):
    """Results by name, as `parallel` makes them."""

    fields: tuple[tuple[str, Type], ...]

    def __str__(self) -> str:
        return "record of " + ", ".join(name for name, _ in self.fields)


TEXT, VECTOR, MESSAGES, ANY_JSON, ANY_LABELS = Text(), Vector(), Messages(), Json({}), Labels()
_RANKED = {"index": {"type": "integer"}, "score": {"type": "number"}, "text": {"type": "string"}}
RANKING = ListOf(Json({"type": "object", "properties": _RANKED, "required": list(_RANKED)}))  # best first


class Label(msgspec.Struct, frozen=True):
    """A value of `Labels`. As text it is its likeliest label."""

    label: str
    scores: dict[str, float] = {}  # by label; empty: there are none, as of a guided choice

    def __str__(self) -> str:
        return self.label

    @property
    def score(self) -> float | None:
        return self.scores.get(self.label)


_label_converter = Converter(Label)


def fits(source: Type, target: Type) -> bool:
    """Whether every value of `source` can stand where a `target` is wanted."""
    match target:
        case Text(among):
            own = source.names if isinstance(source, Labels) else source.among if isinstance(source, Text) else None
            return own is not None and _are_among(own, among)
        case Labels(names):
            return isinstance(source, Labels) and _are_among(source.names, names)
        case ListOf(of):
            if isinstance(source, Messages):
                return fits(ANY_JSON, of)
            return isinstance(source, ListOf) and fits(source.of, of)
        case Json(schema):
            return not schema or schema_fits(schema_of(source), schema)
        case Record(fields):
            has = _fields_of(source)
            return all(name in has and fits(has[name], kind) for name, kind in fields)
        case _:
            return source == target


def _fields_of(kind: Type) -> dict[str, Type]:
    """Fields that every value of this type has."""
    if isinstance(kind, Record):
        return dict(kind.fields)
    if not isinstance(kind, Json) or kind.schema.get("type") != "object":
        return {}
    properties = kind.schema.get("properties", {})
    return {name: type_of_schema(properties.get(name, {})) for name in kind.schema.get("required", ())}


def _are_among(some: tuple[str, ...], all_: tuple[str, ...]) -> bool:
    """Whether all of the first names are among the second; none stand for any."""
    return not all_ or (bool(some) and set(some) <= set(all_))


def common(one: Type, other: Type) -> Type | None:
    """A type that values of both are of; None: they have nothing in common."""
    if isinstance(one, Labels) and isinstance(other, Labels):
        return Labels(_both(one.names, other.names))
    if isinstance(one, Text) and isinstance(other, Text):
        return Text(_both(one.among, other.among))
    if fits(one, other):
        return other
    if fits(other, one):
        return one
    if isinstance(one, Json) and isinstance(other, Json):
        return ANY_JSON
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        inner = common(one.of, other.of)
        return ListOf(inner) if inner is not None else None
    return None


def _both(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one + other)) if one and other else ()


def field_of(kind: Type, name: str | int) -> Type | None:
    """The type of a field or an element of a value; None: it has none of this name."""
    match kind:
        case Record(fields):
            return dict(fields).get(str(name))
        case Labels(names):
            of_labels: dict[str | int, Type] = {
                "label": Text(names),
                "score": Json({"type": "number"}),
                "scores": Json({"type": "object", "additionalProperties": {"type": "number"}}),
            }
            return of_labels.get(name)
        case ListOf(of):
            return of if isinstance(name, int) else None
        case Messages():
            return ANY_JSON if isinstance(name, int) else None
        case Json(schema):
            return _field_of_schema(schema, name)
        case _:
            return None


def _field_of_schema(schema: Schema, name: str | int) -> Type | None:
    if not schema:
        return ANY_JSON
    if isinstance(name, int):
        items = schema.get("items", {})
        return type_of_schema(items if isinstance(items, Mapping) else {}) if schema.get("type") == "array" else None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return type_of_schema(properties[name])
    more = schema.get("additionalProperties", not properties)
    if schema.get("type", "object") != "object" or more is False:
        return None
    return type_of_schema(more) if isinstance(more, Mapping) else ANY_JSON if more else None


def element_of(kind: Type) -> Type | None:
    """The type of what a list holds; None: it is no list."""
    if isinstance(kind, ListOf):
        return kind.of
    if isinstance(kind, Messages) or kind == ANY_JSON:
        return ANY_JSON
    return _field_of_schema(kind.schema, 0) if isinstance(kind, Json) else None


def type_of_schema(schema: object) -> Type:
    """Texts and lists of a document are what other steps make too."""
    if not isinstance(schema, Mapping):
        return ANY_JSON
    among = schema.get("enum")
    if isinstance(among, list) and among and all(isinstance(one, str) for one in among):
        return Text(tuple(among))
    match schema.get("type"):
        case "string":
            return TEXT
        case "array":
            return ListOf(type_of_schema(schema.get("items", {})))
        case _:
            return Json(schema)


def schema_of(kind: Type) -> Schema:
    """The JSON that a value is as JSON."""
    match kind:
        case Text(among):
            return {"type": "string", "enum": list(among)} if among else {"type": "string"}
        case Labels(names):
            label = schema_of(Text(names))
            scores = {"type": "object", "additionalProperties": {"type": "number"}}
            return {"type": "object", "properties": {"label": label, "scores": scores}, "required": ["label", "scores"]}
        case Vector():
            return {"type": "array", "items": {"type": "number"}}
        case Messages():
            return {"type": "array", "items": {"type": "object"}}
        case ListOf(of):
            return {"type": "array", "items": schema_of(of)}
        case Record(fields):
            properties = {name: schema_of(one) for name, one in fields}
            return {"type": "object", "properties": properties, "required": list(properties)}
        case Json(schema):
            return schema
    return {}


def schema_fits(source: Schema, target: Schema) -> bool:
    """Whether what one schema promises is enough for another. Where that cannot be told it is not, unless they are
    equal."""
    if not target or source == target:
        return True
    if "enum" in target:
        own = source.get("enum", [source["const"]] if "const" in source else None)
        return isinstance(own, list) and all(one in target["enum"] for one in own)
    kind, wanted = source.get("type"), target.get("type")
    if wanted is not None and kind != wanted and (kind, wanted) != ("integer", "number"):
        return False
    match wanted:
        case "object":
            own, properties = source.get("properties", {}), target.get("properties", {})
            has_all = set(target.get("required", ())) <= set(source.get("required", ()))
            return has_all and all(schema_fits(own[key], properties[key]) for key in own.keys() & properties.keys())
        case "array":
            return schema_fits(source.get("items", {}), target.get("items", {}))
        case "string" | "integer" | "number" | "boolean" | "null":
            return set(target) <= {"type", "title", "description"}
        case _:
            return False


def check_schema(schema: object, depth: int = 0) -> None:
    """Raises ConfigError for what is no schema."""
    if not isinstance(schema, Mapping):
        raise ConfigError(f"a schema is a mapping, not {_shown(schema)}")
    if depth > _MAX_DEPTH:
        raise ConfigError(f"a schema is nested more than {_MAX_DEPTH} times")
    kind = schema.get("type")
    if kind is not None and not (isinstance(kind, str) and kind in _JSON_TYPES):
        raise ConfigError(f"the type of a schema is one of {', '.join(_JSON_TYPES)}, not {_shown(kind)}")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ConfigError("the properties of a schema are schemas by name")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise ConfigError("what a schema requires is a list of names")
    for one in (*properties.values(), *schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        check_schema(one, depth + 1)


def mismatch(value: object, schema: Schema, at: str = "") -> str | None:
    """Returns what is wrong with a JSON value, by the words of a schema that are looked at here; None: nothing."""
    if not schema:
        return None
    here = at or "the value"
    if "anyOf" in schema and all(mismatch(value, one, at) is not None for one in schema["anyOf"]):
        return f"{here} fits none of the alternatives"
    if "enum" in schema and value not in schema["enum"]:
        return f"{here} is none of those that are allowed"
    if "const" in schema and value != schema["const"]:
        return f"{here} is not what it has to be"
    kind = schema.get("type")
    if kind is not None and not _is_a(value, kind):
        return f"{here} is no {kind}"
    if isinstance(value, dict):
        return _object_mismatch(value, schema, at)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{here} has {len(value)} elements"
        found = (mismatch(one, schema.get("items", {}), f"{at}[{index}]") for index, one in enumerate(value))
        return next((problem for problem in found if problem is not None), None)
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return f"{here} has {len(value)} characters"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{here} is out of range"
    return None


def is_deep(value: object) -> bool:
    """Whether a JSON value is nested deeper than one may be: whatever reads it goes into it by calls in calls."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _object_mismatch(value: dict[str, Any], schema: Schema, at: str) -> str | None:
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{at or 'the value'} has no {missing[0]}"
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, one in value.items():
        if name not in properties and more is False:
            return f"{at or 'the value'} has a {name}, which is not allowed"
        inner = properties.get(name, more if isinstance(more, Mapping) else {})
        if (problem := mismatch(one, inner, f"{at}.{name}" if at else name)) is not None:
            return problem
    return None


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _JSON_TYPES[kind])


def _shown(value: object) -> str:
    return f"'{str(value)[:40]}'"


# -- values


def read_value(value: object, kind: Type) -> tuple[Any, str | None]:
    """A plain value, as a step's process or a model says it, as a value of this type; or what is wrong with it."""
    match kind:
        case Text(among):
            if not isinstance(value, str):
                return None, f"it is no text but a {_kind_of(value)}"
            return (
                (value, None) if not among or value in among else (None, "the text is none of those that are allowed")
            )
        case Labels(names):
            return _read_label(value, names)
        case Vector():
            if isinstance(value, list) and all(_is_a(one, "number") for one in value):
                return value, None
            return None, "it is no list of numbers"
        case Messages():
            if isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
                return value, None
            return None, "it is no list of messages"
        case ListOf(of):
            return _read_list(value, of)
        case Json(schema):
            problem = mismatch(value, schema) if not is_deep(value) else f"it is nested more than {MAX_NESTING} times"
            return (value, None) if problem is None else (None, problem)
        case _:
            return None, f"nothing can be read as {kind}"


def _read_label(value: object, names: tuple[str, ...]) -> tuple[Any, str | None]:
    if isinstance(value, str):
        found = Label(value)
    else:
        try:
            found = _label_converter.convert(value)
        except msgspec.ValidationError:
            return None, "it is no label: a text, or a label and its scores"
    if names and found.label not in names:
        return None, "the label is none of those that are declared"
    return found, None


def _read_list(value: object, of: Type) -> tuple[Any, str | None]:
    if not isinstance(value, list):
        return None, f"it is no list but a {_kind_of(value)}"
    found = []
    for index, one in enumerate(value):
        element, problem = read_value(one, of)
        if problem is not None:
            return None, f"element {index}: {problem}"
        found.append(element)
    return found, None


def _kind_of(value: object) -> str:
    return next((name for name in _JSON_TYPES if _is_a(value, name)), type(value).__name__)


def as_text(value: object) -> str:
    """A value as a client or a prompt is shown it: texts and labels as they are, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Label):
        return value.label
    return msgspec.json.encode(value).decode()

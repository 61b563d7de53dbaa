"""JSON documents against the part of JSON Schema that requests for guided output use, within bounds of work.

Known: type, enum, const, properties, required, additionalProperties, minProperties,
maxProperties, items, prefixItems, minItems, maxItems, minimum, maximum,
exclusiveMinimum, exclusiveMaximum, multipleOf of whole numbers, minLength, maxLength, anyOf, oneOf, allOf, and $ref
within the schema. `pattern` and `format` are not looked at: an expression that a client wrote may take for ever.
What has other keywords that constrain is accepted by those that are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_STEPS = 20_000
MAX_DEPTH = 64


class TooMuchWork(Exception):
    """The schema or the document is larger than is looked at: nothing is said of it."""


def accepts(schema: object, document: object) -> bool:
    """Raises TooMuchWork."""
    return _Check(schema).accepts(schema, document, 0)


class _Check:
    def __init__(self, root: object) -> None:
        self._root = root
        self._steps = 0

    def accepts(self, schema: object, value: Any, depth: int) -> bool:
        self._steps += 1
        if self._steps > MAX_STEPS or depth > MAX_DEPTH:
            raise TooMuchWork
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise TooMuchWork  # no schema that is known here
        if "$ref" in schema and not self.accepts(self._target(schema["$ref"]), value, depth + 1):
            return False
        return (
            _has_type(schema.get("type"), value)
            and ("enum" not in schema or any(_is_same(value, one) for one in _list(schema["enum"])))
            and ("const" not in schema or _is_same(value, schema["const"]))
            and self._combined(schema, value, depth)
            and self._inside(schema, value, depth)
        )

    def _target(self, ref: object) -> object:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise TooMuchWork
        found: Any = self._root
        for part in ref[1:].split("/")[1:]:
            self._steps += 1
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise TooMuchWork
            found = found[name]
        return found

    def _combined(self, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        every = all(self.accepts(one, value, depth + 1) for one in _list(schema.get("allOf", ())))
        if not every or ("anyOf" not in schema and "oneOf" not in schema):
            return every
        if "anyOf" in schema and not any(self.accepts(one, value, depth + 1) for one in _list(schema["anyOf"])):
            return False
        return "oneOf" not in schema or sum(self.accepts(one, value, depth + 1) for one in _list(schema["oneOf"])) == 1

    def _inside(self, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        if isinstance(value, dict):
            return self._object(schema, value, depth)
        if isinstance(value, list):
            return self._array(schema, value, depth)
        if isinstance(value, str):
            return _within(len(value), schema.get("minLength"), schema.get("maxLength"))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(schema, value)
        return True

    def _object(self, schema: Mapping[str, Any], value: dict[str, Any], depth: int) -> bool:
        known = schema.get("properties", {})
        if not isinstance(known, Mapping):
            raise TooMuchWork
        if any(name not in value for name in _list(schema.get("required", ()))):
            return False
        if not _within(len(value), schema.get("minProperties"), schema.get("maxProperties")):
            return False
        others = schema.get("additionalProperties", True) if "patternProperties" not in schema else True
        return all(self.accepts(known.get(name, others), one, depth + 1) for name, one in value.items())

    def _array(self, schema: Mapping[str, Any], value: list[Any], depth: int) -> bool:
        if not _within(len(value), schema.get("minItems"), schema.get("maxItems")):
            return False
        first, others = _list(schema.get("prefixItems", ())), schema.get("items", True)
        schemas = [first[place] if place < len(first) else others for place in range(len(value))]
        return all(self.accepts(schemas[place], one, depth + 1) for place, one in enumerate(value))


def _list(found: object) -> list[Any]:
    if not isinstance(found, list | tuple):
        raise TooMuchWork
    return list(found)


def _is_same(value: object, other: object) -> bool:
    """Whether two values are equal as JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _has_type(kind: object, value: object) -> bool:
    if kind is None:
        return True
    kinds = kind if isinstance(kind, list) else [kind]
    return any(_is_of(one, value) for one in kinds)


def _is_of(kind: object, value: object) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    if not isinstance(kind, str) or kind not in _TYPES:
        raise TooMuchWork
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _within(size: float, least: object, most: object) -> bool:
    return (not isinstance(least, int | float) or size >= least) and (not isinstance(most, int | float) or size <= most)


def _number(schema: Mapping[str, Any], value: float) -> bool:
    above, below, unit = (schema.get(name) for name in ("exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
    return (
        _within(value, schema.get("minimum"), schema.get("maximum"))
        and (not isinstance(above, int | float) or value > above)
        and (not isinstance(below, int | float) or value < below)
        and (not (isinstance(unit, int) and isinstance(value, int) and unit > 0) or value % unit == 0)
    )

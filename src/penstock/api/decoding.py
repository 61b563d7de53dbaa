"""Decoding of a body's bytes to a checked struct, or to an error that a person can act on.

Types, ranges and unknown names are msgspec's to check; a struct's own rules live in its `__post_init__`, as `Refused`.
Either way msgspec knows the path, and `decode` puts what it says into words. This module knows no endpoint.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from penstock.core.config import nearest
from penstock.core.errors import InvalidRequest, UnsupportedParameter


class NotBuilt:
    """Marks a field that is understood but cannot be honoured: refused, unless its value asks for nothing.

    `tool_choice: Annotated[Any, NotBuilt("none", "auto")] = None`; null always asks for nothing.
    """

    def __init__(self, *harmless: object, error: type[InvalidRequest] = UnsupportedParameter) -> None:
        self.harmless = harmless
        self.error = error


class NoEffect:
    """Marks a field that is accepted and changes nothing in the answer; `why`: for the reference."""

    def __init__(self, why: str) -> None:
        self.why = why


class Refused(ValueError):
    """Error that a struct's `__post_init__` raises; msgspec adds the path, and `decode` makes the client's error."""

    def __init__(self, field: str, problem: str, error: type[InvalidRequest] = InvalidRequest) -> None:
        super().__init__(problem)
        self.field = field
        self.error = error


M = TypeVar("M", NotBuilt, NoEffect)


class WireStruct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that clients send: nothing unknown, and nothing that would have to be ignored."""

    def __post_init__(self) -> None:
        for name, mark in marked(type(self), NotBuilt):
            value = getattr(self, name)
            if value is not None and value not in mark.harmless:
                raise Refused(name, "is not supported by this server", mark.error)


@functools.cache
def marked(cls: type, kind: type[M]) -> list[tuple[str, M]]:
    """Fields of a struct that have a mark of this kind."""
    hints = get_type_hints(cls, include_extras=True)
    return [(name, mark) for name, hint in hints.items() for mark in get_args(hint) if isinstance(mark, kind)]


T = TypeVar("T", bound=WireStruct)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    if not body or body.isspace():
        raise InvalidRequest("the body is empty; expected a JSON object")
    check_size(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(error, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid JSON: it is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: it is nested too deeply") from None


_ALWAYS_FINE_BYTES = 128 << 10
_PART_BYTES = 64 << 10
MAX_ITEMS = 500_000  # commas outside of strings; token ids take 60 ns each
MAX_OBJECTS = 100_000  # objects, lists and members of objects; these take 400 ns each, and nobody else runs meanwhile


def check_size(body: bytes) -> None:
    """Refuses a body of more values than can be decoded in some 50 ms. Text is cheap, so what stands in strings does
    not count; it is looked for only where a body has enough of everything to be suspected."""
    if len(body) <= _ALWAYS_FINE_BYTES or (body.count(b",") <= MAX_ITEMS and _num_objects(body) <= MAX_OBJECTS):
        return
    num_items = num_objects = 0
    for plain in _outside_strings(body):
        num_items += plain.count(b",")
        num_objects += _num_objects(plain)
        if num_items > MAX_ITEMS or num_objects > MAX_OBJECTS:
            raise InvalidRequest(
                f"the body has more than {MAX_ITEMS} values, or more than {MAX_OBJECTS} objects, lists and members"
            )


def _num_objects(json: bytes) -> int:
    return sum(map(json.count, (b"{", b"[", b":")))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The bytes outside of strings, part by part: each takes a millisecond, and other threads may run in between."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quotation mark begins or ends a string
    is_inside = False
    for start in range(0, len(plain), _PART_BYTES):
        parts = plain[start : start + _PART_BYTES].split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


_MAX_PROBLEM = 4096  # characters of what msgspec says that are looked at; a client's word may be among them
_PATH = re.compile(r"^(?P<problem>.*) - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_ENUM = re.compile(r"^Invalid (?:enum )?value (.*)$", re.DOTALL)
_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_RANGE = re.compile(r"^Expected `[^`]*` (.*)$")

_IN_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MAX_ECHO = 100  # characters of the client's own words that an error repeats
_MAX_WORDS = 200  # of msgspec's, where it says what is not known here


def explain(error: msgspec.ValidationError, cls: type) -> InvalidRequest:
    """The error of a body that is no `cls`, in words."""
    said = str(error)
    if len(said) > 2 * _MAX_PROBLEM:  # the path is at its end, and made of this module's own words
        said = f"{said[:_MAX_PROBLEM]}{said[-_MAX_PROBLEM:]}"
    located = _PATH.match(said)
    problem = located["problem"] if located else said
    path = _clip(located["path"].removeprefix(".").removesuffix("[...]")) if located else ""

    refused = error.__cause__
    if isinstance(refused, Refused):
        return _about(_join(path, refused.field), str(refused), refused.error)
    if unknown := _UNKNOWN.match(problem):
        return _unknown_field(path, unknown[1], cls)
    if missing := _MISSING.match(problem):
        return _about(_join(path, missing[1]), "is required")
    if value := _ENUM.match(problem):
        allowed = ", ".join(repr(choice) for choice in _literals(_hint_at(cls, path)))
        return _about(path, f"{_clip(value[1])} is not one of {allowed}")
    if wrong := _TYPE.match(problem):
        expected = " or ".join(_words(kind) for kind in wrong["expected"].split(" | ") if kind != "null")
        subject = "expected every key to be" if located and located["key"] else "expected"
        return _about(path, f"{subject} {expected}, got {_words(wrong['got'])}")
    if limit := _RANGE.match(problem):
        return _about(path, f"must be {limit[1]}")
    return _about(path, _clip(problem[:1].lower() + problem[1:], _MAX_WORDS))


def _about(path: str, problem: str, error: type[InvalidRequest] = InvalidRequest) -> InvalidRequest:
    return error(f"{path or 'body'}: {problem}", param=path or None)


def _unknown_field(path: str, name: str, cls: type) -> InvalidRequest:
    structs = _structs(_hint_at(cls, path) if path else cls)
    known = [field for struct in structs for field in struct.__struct_encode_fields__]
    meant = nearest(name, known)
    suggestion = f"; did you mean '{_join(path, meant)}'?" if meant else ""
    where = _clip(_join(path, name))
    return InvalidRequest(f"unknown field '{where}'{suggestion}", param=where)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def _words(kind: str) -> str:
    return _IN_WORDS.get(kind, kind)


def _clip(text: str, most: int = _MAX_ECHO) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _hint_at(cls: type, path: str) -> Any:
    """The annotation of the field at a path like `messages[0].content`; None where the path names no field."""
    hint: Any = cls
    for name in re.findall(r"[A-Za-z_]\w*", path):
        hint = next((hints[name] for struct in _structs(hint) if name in (hints := get_type_hints(struct))), None)
    return hint


def _structs(hint: Any) -> Iterator[Any]:
    """Every struct inside an annotation, however deep in unions and lists."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)


def _literals(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
        return
    for inner in get_args(hint):
        yield from _literals(inner)

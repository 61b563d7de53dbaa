"""Frozen dataclasses from plain mappings (YAML). An unknown key is an error that names the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, TypeVar, get_type_hints

import msgspec

from penstock.core.converter import Converter
from penstock.core.errors import ConfigError

T = TypeVar("T")


_MAX_WORD = 64  # characters of a word that somebody may have meant to spell otherwise
_MAX_COMPARED = 200  # a comparison takes some 50 µs, and strangers choose the words


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant. The search is bounded, whoever sent the word."""
    if len(word) > _MAX_WORD:
        return None
    most_apart = len(word) // 2 + 2  # further apart in length, two words have too little in common
    alike = (name for name in known if abs(len(name) - len(word)) <= most_apart)
    found = difflib.get_close_matches(word, islice(alike, _MAX_COMPARED), n=3, cutoff=0.6)
    letters = sorted(word)  # two of them swapped are the likeliest slip
    return max(found, key=lambda name: sorted(name) == letters, default=None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown word; empty: no known one is like it."""
    meant = nearest(word, known)
    return f"; did you mean '{meant}'?" if meant else ""


def shown(word: str) -> str:
    """A stranger's word as an error repeats it: its beginning, if it is long."""
    return word if len(word) <= _MAX_WORD else f"{word[:_MAX_WORD]}…"


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Types of the fields; to evaluate them takes longer than all the rest of `build`."""
    return get_type_hints(cls, include_extras=True)


@cache
def _converter(cls: type, field: str) -> Converter[Any]:
    return Converter(_hints(cls)[field])


def build(cls: type[T], values: Mapping[str, Any], *, where: str = "") -> T:
    """An instance of the dataclass `cls` from plain values; nested dataclasses from nested mappings."""
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = _hints(cls)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}{key}"
        if key not in fields:
            hint = nearest(key, fields)
            suggestion = f"; did you mean '{where}{hint}'?" if hint else ""
            raise ConfigError(f"unknown setting '{path}'{suggestion}", param=path)
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            arguments[key] = build(hints[key], value, where=f"{path}.")
            continue
        try:
            arguments[key] = _converter(cls, key).convert(value)  # type: ignore[arg-type]
        except msgspec.ValidationError as error:
            raise ConfigError(f"setting '{path}': {error}", param=path) from None
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name not in arguments and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"setting '{where}{f.name}' is missing", param=f"{where}{f.name}")
    return cls(**arguments)


@contextmanager
def within(where: str) -> Iterator[None]:
    """Complete the `param` of a ConfigError from inside, which knows its own part of a setting's name."""
    try:
        yield
    except ConfigError as error:
        if not (error.param or "").startswith(where):
            error.param = f"{where}{error.param or ''}".rstrip(".")
        raise

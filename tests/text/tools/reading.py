"""Answers read by a parser, in one piece or in many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.text.tools import FORMATS, Part, Tool
from penstock.text.tools.parser import CallParser
from penstock.text.tools.parts import CallArguments, CallBegun, CallEnded, Text, add

NAMES = ["get_weather", "f", "g", "brave_search"]


def parser(name: str, most: int | None = None) -> CallParser:
    return FORMATS[name].parser([Tool(name) for name in NAMES], most)


def read(name: str, pieces: Iterable[str], most: int | None = None) -> list[Part]:
    """Returns what is told, with what belongs together put together."""
    reader, found = parser(name, most), list[Part]()
    for piece in pieces:
        for part in reader.push(piece):
            add(found, part)
    for part in reader.flush():
        add(found, part)
    return found


def told(parts: Iterable[Part]) -> list[Any]:
    """Texts, and calls as (name, arguments, how they ended)."""
    found: list[Any] = []
    for part in parts:
        match part:
            case Text(text):
                found.append(text)
            case CallBegun(_, name):
                found.append((name, "", "cut"))
            case CallArguments(_, text):
                name, before, end = found[-1]
                found[-1] = (name, before + text, end)
            case CallEnded():
                name, arguments, _ = found[-1]
                found[-1] = (name, arguments, "ended")
    return found

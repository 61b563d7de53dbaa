"""The patterns by which PEFT gives some layers a rank or an alpha of their own.

PEFT runs each as a regular expression on a layer's name. A file from anywhere may hold one that takes forever, with the
interpreter lock; so only those are read that take no time: names, ends of names, and names with a few marks in them.
Those that PEFT itself writes are names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_PATTERN = 256  # characters
_MAX_NAME = 256  # of a layer that patterns with marks are to match; a match takes the square of it
_MAX_MATCHES = 20_000  # of patterns with marks, times layers

_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")
# A name with digits, a choice among words or, once, anything in it. Digits end where they end and the longest word that
# is there counts, so nothing is tried twice.
_PIECE = re.compile(
    r"(?P<digits>(?:\\d|\[0-9\])\+?)|(?P<anything>\.[*+])|(?P<name>[\w-]|\\?\.)|\((?:\?:)?(?P<words>(?:[\w|-]|\\?\.)+)\)"
)


class LayerPatterns:
    """Values by pattern: the first pattern that a layer's name ends with counts, as in PEFT."""

    def __init__(self, patterns: Mapping[str, Any], layers: Iterable[str]) -> None:
        """Raises a ValueError for a pattern that is not read."""
        self._values = list(patterns.values())
        self._plain: dict[str, int] = {}  # places in the list, by a name or the end of one; ^ before a whole one
        self._marked: dict[int, re.Pattern[str]] = {}
        for place, pattern in enumerate(patterns):
            if len(pattern) > _MAX_PATTERN:
                raise ValueError(f"a pattern of {len(pattern)} characters; the most is {_MAX_PATTERN}")
            if _PLAIN.fullmatch(pattern):
                self._plain.setdefault(pattern.removesuffix("$").replace("\\.", "."), place)
            else:
                self._marked[place] = _safe(pattern)
        if self._marked:
            lengths = [len(name) for name in layers]
            if len(self._marked) * len(lengths) > _MAX_MATCHES or max(lengths, default=0) > _MAX_NAME:
                raise ValueError(f"{len(self._marked)} patterns that are no names, for {len(lengths)} layers: too many")

    def find(self, layer: str, default: Any) -> Any:
        places = [place for place, pattern in self._marked.items() if pattern.fullmatch(layer)]
        if self._plain:
            parts = layer.split(".") if len(layer) <= _MAX_PATTERN else layer[-_MAX_PATTERN:].split(".")[1:]
            ends = [".".join(parts[start:]) for start in range(len(parts))]
            places += [self._plain[end] for end in (*ends, f"^{layer}") if end in self._plain]
        return self._values[min(places)] if places else default


def _safe(pattern: str) -> re.Pattern[str]:
    body, at, num_anything = pattern.removeprefix("^").removesuffix("$"), 0, 0
    if "|" in body and "(" not in body:
        body = f"({body})"
    found = ""
    while at < len(body):
        piece = _PIECE.match(body, at)
        if piece is None:
            raise ValueError(f"the pattern {pattern!r} is more than a name with digits, (a|b) and one .* in it")
        at = piece.end()
        match piece.lastgroup:
            case "digits":
                found += r"\d++" if piece[0].endswith("+") else r"\d"
            case "anything":
                num_anything += 1
                found += piece[0]
            case "words":
                found += f"(?>{'|'.join(sorted(set(piece['words'].split('|')), key=len, reverse=True))})"
            case _:
                found += piece[0]
    if num_anything > 1 or not found:
        raise ValueError(f"the pattern {pattern!r} has more than one .* in it, or nothing")
    return re.compile(found if pattern.startswith("^") else rf"(?:.*\.)?{found}", re.DOTALL)

"""Protobuf's text format, as far as Triton's `config.pbtxt` goes: to the plain values that YAML would give.

    max_batch_size: 8
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
    dynamic_batching { max_queue_delay_microseconds: 100 }

A field that is given several times is a list. A map, which is a list of `{ key: … value: … }`, is an object.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import Any

_TOKENS = re.compile(
    r"""\s+|\#[^\n]*|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[A-Za-z_][\w.]*)"""
    r"""|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<mark>[{}\[\]:,;<>])|(?P<other>.)"""
)
_MAX_DEPTH = 16
_END = ("end", "")
_Token = tuple[str, str]


def read_text_format(text: str, lists: Collection[str] = ()) -> dict[str, Any]:
    """`lists`: fields that are lists though they may be given once. Raises ValueError, with the line."""
    return _Parser(text, lists).message(_END, 0)


class _Parser:
    def __init__(self, text: str, lists: Collection[str]) -> None:
        self._lists = lists
        self._tokens = self._scan(text)
        self._line = 1
        self._next = next(self._tokens)

    def message(self, end: _Token, depth: int) -> dict[str, Any]:
        if depth > _MAX_DEPTH:
            raise self._wrong("too many messages in messages")
        found: dict[str, list[Any]] = {}
        while self._next != end:
            kind, name = self._take()
            if kind != "word":
                raise self._wrong(f"expected a field's name, not {name or 'the end'!r}")
            found.setdefault(name, []).extend(self._values(depth))
            while self._next in (("mark", ","), ("mark", ";")):
                self._take()
        self._take()
        return {name: self._joined(name, values) for name, values in found.items()}

    def _joined(self, name: str, values: list[Any]) -> Any:
        if all(isinstance(one, dict) and set(one) == {"key", "value"} for one in values):
            return {str(one["key"]): one["value"] for one in values}
        return values if name in self._lists or len(values) > 1 else values[0]

    def _values(self, depth: int) -> list[Any]:
        if self._next == ("mark", ":"):
            self._take()
        elif self._next not in (("mark", "{"), ("mark", "["), ("mark", "<")):
            raise self._wrong("expected ':' or '{'")
        if self._next != ("mark", "["):
            return [self._value(depth)]
        self._take()
        values = []
        while self._next != ("mark", "]"):
            values.append(self._value(depth))
            if self._next == ("mark", ","):
                self._take()
        self._take()
        return values

    def _value(self, depth: int) -> Any:
        kind, token = self._take()
        match kind:
            case "text":
                parts = [token]
                while self._next[0] == "text":  # neighbours are one text
                    parts.append(self._take()[1])
                return "".join([str(ast.literal_eval(part)) for part in parts])
            case "number":
                return float(token) if set(token) & set(".eE") else int(token)
            case "word":
                return {"true": True, "false": False}.get(token, token)
            case "mark" if token in "{<":
                return self.message(("mark", "}" if token == "{" else ">"), depth + 1)
            case _:
                raise self._wrong(f"expected a value, not {token or 'the end'!r}")

    def _take(self) -> _Token:
        taken = self._next
        self._next = next(self._tokens, _END)
        return taken

    def _scan(self, text: str) -> Iterator[_Token]:
        for found in _TOKENS.finditer(text):
            if found.lastgroup == "other":
                raise self._wrong(f"{found[0]!r} is no part of the text format")
            if found.lastgroup is not None:
                yield found.lastgroup, found[0]
            self._line += found[0].count("\n")
        yield _END

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"line {self._line}: {why}")

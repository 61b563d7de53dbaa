"""Reads a few numbers out of a Prometheus exposition, which may hold thousands.

It looks for the names it is asked for and passes over the rest, so it cares little for what else is in there or
whether that is well-formed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from penstock.dialects.dialect import Join, Names, Series, Signal

_LABEL = re.compile(rb'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb"\\[\\\"n]")

Labels = dict[str, str]
Sample = tuple[Labels, float]


def read(text: bytes, wanted: Mapping[Signal, Series]) -> dict[Signal, float | None]:
    """None: it is not there, or not a number."""
    names = tuple({name: None for series in wanted.values() for name in (*series.names, *series.also)})
    found = samples(text, names)
    return {signal: _number(found, series) for signal, series in wanted.items()}


def samples(text: bytes, names: Names) -> dict[str, list[Sample]]:
    """Every series of these names, in one pass."""
    found: dict[str, list[Sample]] = {}
    for name, rest in _lines_of(names).findall(b"\n" + text):
        if (sample := _sample(rest)) is not None:
            found.setdefault(name.decode(), []).append(sample)
    return found


@lru_cache(maxsize=64)
def _lines_of(names: Names) -> re.Pattern[bytes]:
    return re.compile(rb"\n(%b)([ \t{][^\n]*)" % b"|".join([re.escape(name.encode()) for name in names]))


def _number(found: Mapping[str, list[Sample]], series: Series) -> float | None:
    values = next((values for name in series.names if (values := _values(found.get(name, ()), series))), [])
    for name in series.also:
        values = values + _values(found.get(name, ()), series)
    return joined(values, series.join)


def _values(samples_of_name: Iterable[Sample], series: Series) -> list[float]:
    wanted, found = series.labels.items(), []
    for labels, value in samples_of_name:
        if not wanted <= labels.items():
            continue
        number = value if series.label is None else _float(labels.get(series.label, ""))
        if number is not None and math.isfinite(number):
            found.append(number)
    return found


def joined(values: list[float], join: Join) -> float | None:
    if not values:
        return None
    return max(values) if join == "max" else sum(values)


def _sample(rest: bytes) -> Sample | None:
    labels: Labels = {}
    at = 0
    if rest.startswith(b"{"):
        at = 1
        while (match := _LABEL.match(rest, at)) is not None:
            value = match[2]
            if b"\\" in value:
                value = _ESCAPE.sub(lambda found: _ESCAPES[found[0]], value)
            labels[match[1].decode()] = value.decode(errors="replace")
            at = match.end()
        if rest[at : at + 1] != b"}":
            return None
        at += 1
    words = rest[at:].split(None, 1)  # a time, or an exemplar, may follow
    value_text = words[0].decode(errors="replace") if words else ""
    number = _float(value_text)
    return None if number is None else (labels, number)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

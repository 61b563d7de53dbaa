"""Phases of a replica's time to first token, in the answer's head: `Server-Timing`, as browsers show it too.

server-timing: tokenize;dur=0.41, queue;dur=1.2, prefill;dur=33.9, first_token;dur=0.6

Durations are milliseconds with three decimals, one after the other in the order they are written. They are rounded so
that they add up: their sum is the time to the first token rounded to the same microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

HEADER = b"server-timing"


def encode(parts: Mapping[str, float]) -> bytes:
    """`parts`: seconds by name, of names without spaces and marks."""
    ends_us = [0, *(round(1e6 * end_s) for end_s in accumulate(parts.values()))]
    spans_us = zip(parts, pairwise(ends_us), strict=True)
    return ", ".join([f"{name};dur={(end - start) / 1e3:.3f}" for name, (start, end) in spans_us]).encode()


def decode(header: bytes) -> dict[str, float]:
    """Seconds by name, as far as the header can be read: another server's may say anything."""
    found: dict[str, float] = {}
    for entry in header.decode("latin-1").split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur" and name:
                try:
                    seconds = float(value.strip().strip('"')) / 1e3
                except ValueError:
                    continue
                if 0.0 <= seconds < 1e6:
                    found[name] = seconds
    return found

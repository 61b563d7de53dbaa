"""Where a replica's time to the first token went, on the answer's head: `Server-Timing`, as browsers show it too.

server-timing: tokenize;dur=0.41, queue;dur=1.2, prefill;dur=33.9, first_token;dur=0.6

Durations are milliseconds, one after the other in the order they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

HEADER = b"server-timing"


def encode(parts: Mapping[str, float]) -> bytes:
    """`parts`: seconds by name, of names without spaces and marks."""
    return ", ".join([f"{name};dur={1e3 * seconds:.3f}" for name, seconds in parts.items()]).encode()


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

"""Measured seconds of each change of state, per pool: what the policy plans with."""

from __future__ import annotations

from collections import deque

import msgspec

from penstock.fleet.policy.observation import Durations

_KEPT = 20
_FIRST = Durations()


class MeasuredDurations:
    """The last measurements of each change; until there is one, a guess."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in Durations.__struct_fields__}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name].append(seconds)

    def p95(self) -> Durations:
        values = {name: _p95(found) for name, found in self._seconds.items() if found}
        return msgspec.structs.replace(_FIRST, **values)

    def encode(self) -> str:
        return msgspec.json.encode({name: list(found) for name, found in self._seconds.items()}).decode()

    def restore(self, document: str) -> None:
        for name, found in msgspec.json.decode(document, type=dict[str, list[float]]).items():
            if name in self._seconds:
                self._seconds[name].extend(found)


def _p95(found: deque[float]) -> float:
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

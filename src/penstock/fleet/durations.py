"""Measured seconds of each change of state, per pool: what the policy plans with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.fleet.policy.observation import Durations

_KEPT = 20
_FIRST = Durations()


class MeasuredDurations:
    """The last measurements of each change; until there is one, a guess: the longest of `peers`, which are the pools
    of the same device, or else a constant."""

    def __init__(self) -> None:
        self.peers: Sequence[MeasuredDurations] = ()
        self._seconds: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in Durations.__struct_fields__}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name].append(seconds)

    def p95(self) -> Durations:
        guesses: dict[str, float] = {}
        for peer in self.peers:
            for name, seconds in peer.measured().items():
                guesses[name] = max(seconds, guesses.get(name, 0.0))
        return msgspec.structs.replace(_FIRST, **guesses | self.measured())

    def measured(self) -> dict[str, float]:
        return {name: _p95(found) for name, found in self._seconds.items() if found}

    def encode(self) -> str:
        return msgspec.json.encode({name: list(found) for name, found in self._seconds.items()}).decode()

    def restore(self, document: str) -> None:
        for name, found in msgspec.json.decode(document, type=dict[str, list[float]]).items():
            if name in self._seconds:
                self._seconds[name].extend(found)


def _p95(found: deque[float]) -> float:
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

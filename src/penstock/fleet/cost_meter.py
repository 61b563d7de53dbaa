"""Replica-seconds and money of a pool, by the state that its replicas are in: metered round by round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.tenancy.fleet import FleetReplica


class Metered(NamedTuple):
    seconds: dict[str, float]
    costs: dict[str, float]


_metered_decoder = msgspec.json.Decoder(tuple[float | None, Metered])


class CostMeter:
    """A meter of what replicas cost. Between two rounds a replica is in the state that the later one finds it in. The
    time without a controller is paid for too: the next one goes on from when the last one looked."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._metered = Metered({}, {})

    def observe(self, rows: Iterable[FleetReplica], now: float) -> None:
        if self._at is not None:
            seconds, costs = self._metered
            for row in rows:
                passed_s = max(0.0, now - max(self._at, row.created_at))
                seconds[row.state] = seconds.get(row.state, 0.0) + passed_s
                costs[row.state] = costs.get(row.state, 0.0) + passed_s / 3600 * row.price_per_hour
        self._at = now

    def take(self) -> Metered:
        """All since it was last taken."""
        taken, self._metered = self._metered, Metered({}, {})
        return taken

    def encode(self) -> str:
        return msgspec.json.encode((self._at, self._metered)).decode()

    def restore(self, document: str) -> None:
        self._at, self._metered = _metered_decoder.decode(document)

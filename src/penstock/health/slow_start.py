"""A replica that joins or comes back is cold: its share of traffic grows from a tenth to the whole over a while."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlowStartSettings:
    ramp_s: float = 30.0
    first_share: float = 0.1


class SlowStart:
    def __init__(self, settings: SlowStartSettings | None = None) -> None:
        self._settings = settings or SlowStartSettings()
        self._since: float | None = None

    def begin(self, now: float) -> None:
        self._since = now

    def share(self, now: float) -> float:
        if self._since is None:
            return 1.0
        first, ramp_s = self._settings.first_share, self._settings.ramp_s
        done = (now - self._since) / ramp_s if ramp_s > 0 else 1.0
        if done >= 1.0:
            self._since = None
            return 1.0
        return first + (1.0 - first) * max(0.0, done)

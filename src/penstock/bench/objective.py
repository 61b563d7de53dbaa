"""The SLO that a load is judged by: `ttft=0.5,tpot=0.05,e2e=10`, in seconds or with a unit."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.load import Result
from penstock.core.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Objective:
    """The most seconds of each; None: any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            seconds = _seconds(value.strip())
            if name.strip() not in NAMES or not equals or seconds is None:
                raise ConfigError(f"{part!r} is not an objective; those are such as ttft=0.5,tpot=50ms,e2e=10s")
            limits[name.strip()] = seconds
        return cls(**limits)

    def is_kept(self, result: Result) -> bool:
        """One that failed has not kept it; a single token has no TPOT to miss."""
        if result.error is not None:
            return False
        reached = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2e": result.e2e_s}
        return all(
            found is None or found <= limit for name, limit in self.limits().items() for found in [reached[name]]
        )

    def limits(self) -> dict[str, float]:
        return {name: limit for name in NAMES if (limit := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {_short(limit)}" for name, limit in self.limits().items())


def _seconds(text: str) -> float | None:
    factor = 0.001 if text.endswith("ms") else 1.0
    text = text.removesuffix("s").removesuffix("m") if factor < 1 else text.removesuffix("s")
    try:
        value = float(text) * factor
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _short(seconds: float) -> str:
    return f"{1000 * seconds:g} ms" if seconds < 1 else f"{seconds:g} s"

"""Lengths: a number of tokens, or a distribution to draw one from. Randomness is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from penstock.core.errors import ConfigError

FORMS = "128, 128:512 (uniform), normal:MEAN:SD or lognormal:MEAN:SD, the last two with :MOST behind if you like"


@dataclass(frozen=True)
class Lengths:
    """A length in tokens, always at least one."""

    kind: str  # fixed, uniform, normal, lognormal
    first: float  # fixed: the length; uniform: the least; else the mean
    second: float = 0.0  # uniform: the most; else the standard deviation
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ConfigError."""
        kind, *numbers = text.split(":")
        try:
            if kind not in ("normal", "lognormal"):
                least, *rest = (_positive(part) for part in (kind, *numbers))
                if not rest:
                    return cls("fixed", least)
                (most,) = rest
                if most >= least:
                    return cls("uniform", least, most)
            else:
                mean, spread, *most_of = (_positive(part) for part in numbers)
                if len(most_of) <= 1:
                    return cls(kind, mean, spread, int(most_of[0]) if most_of else None)
        except ValueError:
            pass
        raise ConfigError(f"{text!r} is not a length in tokens; those are {FORMS}")

    @property
    def mean(self) -> float:
        """The mean of what the distribution says, before anything is cut."""
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def at(self, share: float) -> int:
        """The length that this share of all, above 0 and below 1, is shorter than."""
        match self.kind:
            case "uniform":
                drawn = self.first + share * (self.second - self.first + 1) - 0.5
            case "normal":
                drawn = NormalDist(self.first, self.second).inv_cdf(share)
            case "lognormal":
                drawn = math.exp(NormalDist(*self._log_scale()).inv_cdf(share))
            case _:
                drawn = self.first
        return max(1, min(round(drawn), self.most or round(drawn)))

    def __str__(self) -> str:
        """The text that it is parsed from."""
        numbers = [self.first] if self.kind == "fixed" else [self.first, self.second]
        named = [self.kind] if self.kind in ("normal", "lognormal") else []
        return ":".join([*named, *(str(int(number)) for number in numbers), *([str(self.most)] if self.most else [])])

    def draw(self, source: Random) -> int:
        match self.kind:
            case "uniform":
                return source.randint(int(self.first), int(self.second))
            case "normal":
                drawn = source.gauss(self.first, self.second)
            case "lognormal":
                drawn = source.lognormvariate(*self._log_scale())
            case _:
                return int(self.first)
        return max(1, min(round(drawn), self.most or round(drawn)))

    def _log_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        variance = math.log(1 + (self.second / self.first) ** 2)
        return math.log(self.first) - variance / 2, math.sqrt(variance)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(text)
    return int(text)

"""What tokens cost. Amounts are whole nano-units of the operator's currency, so that sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta

NANOS = 1_000_000_000
Amount = Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True)
class Price:
    """Per 1,000 tokens."""

    input_per_1k: Amount = 0.0
    output_per_1k: Amount = 0.0
    cached_per_1k: Amount | None = None  # of input that came from the prefix cache; None: as other input

    def nanos(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        cached_per_1k = self.input_per_1k if self.cached_per_1k is None else self.cached_per_1k
        fresh = (input_tokens - cached_tokens) * self.input_per_1k
        per_1k = fresh + cached_tokens * cached_per_1k + output_tokens * self.output_per_1k
        return round(per_1k * (NANOS // 1000))


FREE = Price()


class PriceList:
    """A price by model name or pattern; the first that fits counts. A model that is not listed costs nothing."""

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = dict(prices)
        self._found: dict[str, Price] = {}  # by served name, of which there are few

    def of(self, model: str) -> Price:
        if (price := self._found.get(model)) is None:
            fitting = (price for pattern, price in self._prices.items() if fnmatchcase(model, pattern))
            price = self._found[model] = next(fitting, FREE)
        return price

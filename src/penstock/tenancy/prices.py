"""Prices of tokens and device time. Amounts are whole nano-units of the operator's currency, so that sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

NANOS = 1_000_000_000
MAX_COST_NANOS = 10**18  # of one request: the largest budget there is; a store can hold nine of them
Amount = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass(frozen=True)
class Price:
    """Prices of one model: per million tokens, and per hour of one of its replicas; a request pays both."""

    input: Amount = 0.0
    output: Amount = 0.0
    cached: Amount | None = None  # of input that came from the prefix cache; None: as other input
    replica_hour: Amount = 0.0  # of the device-seconds that replicas measure
    batch: Annotated[float, Meta(ge=0, le=1)] = 0.5  # the part of all these that rows of batches pay

    @cached_property
    def is_free(self) -> bool:
        return self == FREE

    @cached_property
    def of_batches(self) -> Price:
        """The price for rows of batches."""
        cached = None if self.cached is None else self.cached * self.batch
        return Price(self.input * self.batch, self.output * self.batch, cached, self.replica_hour * self.batch, 1.0)

    def nanos(self, input_tokens: int, cached_tokens: int, output_tokens: int, device_s: float = 0.0) -> int:
        cached_price = self.input if self.cached is None else self.cached
        cached_tokens = min(cached_tokens, input_tokens)
        fresh = (input_tokens - cached_tokens) * self.input
        by_tokens = (fresh + cached_tokens * cached_price + output_tokens * self.output) * (NANOS // 1_000_000)
        return round(min(by_tokens + device_s * self.replica_hour * (NANOS / 3600), MAX_COST_NANOS))


FREE = Price()

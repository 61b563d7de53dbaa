"""Samples of what replicas and models did within one period, added up from requests that ended, and their signals."""

from __future__ import annotations

from enum import StrEnum
from statistics import median
from typing import NamedTuple, Protocol

_MAX_TIMES = 256  # kept of a period for its median: the first ones


class EndedRequest(Protocol):
    """One request, over; what a gateway's recorder is told. Times are in seconds from its arrival."""

    @property
    def model(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def ending(self) -> str: ...  # ok, refused, failed or client_gone
    @property
    def input_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def total_s(self) -> float | None: ...


class Signal(StrEnum):
    TOKENS = "tokens_per_s"  # of a model: all that it says
    SPEED = "decode_tokens_per_s"  # of a stream
    TTFT = "ttft_s"
    ANSWER = "tokens_per_answer"
    HIT_RATE = "hit_rate"
    ACCEPTANCE = "acceptance"  # of drafted tokens


class Reading(NamedTuple):
    value: float
    requests: int  # that it was taken from


class Sample:
    """One period of a replica, or of a model."""

    __slots__ = (
        "accepted",
        "cached",
        "decode_s",
        "decoded",
        "drafted",
        "input",
        "output",
        "requests",
        "streams",
        "ttfts",
    )

    def __init__(self) -> None:
        self.requests = self.streams = self.input = self.cached = self.output = self.decoded = 0
        self.drafted = self.accepted = 0
        self.decode_s = 0.0
        self.ttfts: list[float] = []

    def add(self, request: EndedRequest) -> None:
        """One that was ok."""
        self.requests += 1
        self.input += request.input_tokens
        self.cached += request.cached_tokens
        self.output += request.output_tokens
        if request.ttft_s is not None:
            if len(self.ttfts) < _MAX_TIMES:
                self.ttfts.append(request.ttft_s)
            if request.total_s is not None and request.output_tokens > 1:
                self.streams += 1
                self.decoded += request.output_tokens - 1
                self.decode_s += max(request.total_s - request.ttft_s, 0.0)

    def merge(self, other: Sample) -> None:
        for name in ("requests", "streams", "input", "cached", "output", "decoded", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.decode_s += other.decode_s
        self.ttfts += other.ttfts

    def readings(self, period_s: float, *, is_model: bool) -> dict[Signal, Reading]:
        """Those that something is known of."""
        found = {}
        if is_model:
            found[Signal.TOKENS] = Reading(self.output / period_s, self.requests)
        if self.decode_s > 0 and self.decoded:
            found[Signal.SPEED] = Reading(self.decoded / self.decode_s, self.streams)
        if self.ttfts:
            found[Signal.TTFT] = Reading(median(self.ttfts), len(self.ttfts))
        if self.requests and self.output:
            found[Signal.ANSWER] = Reading(self.output / self.requests, self.requests)
        if self.input:
            found[Signal.HIT_RATE] = Reading(self.cached / self.input, self.requests)
        if self.drafted:
            found[Signal.ACCEPTANCE] = Reading(self.accepted / self.drafted, self.requests)
        return found

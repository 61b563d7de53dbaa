"""Spans as plain facts, and which requests' are kept. Nothing here sends them or knows a clock.

A span is written when all is over, from what was taken down anyway: a request that is not kept costs no span. So that
can be decided at the end, when it is known whether it failed or was slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from random import Random
from typing import NamedTuple

from penstock.observe.trace_context import PARENT, STATE, TraceContext, parse

Value = str | int | float | bool | Sequence[str] | Sequence[float]
Attributes = Mapping[str, Value]

_LOW_56 = (1 << 56) - 1


class Kind(IntEnum):
    """Kinds of spans as OTLP counts them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class Span(NamedTuple):
    name: str
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str  # empty: it has none
    start_ns: int  # since 1970
    end_ns: int
    attributes: Attributes
    error: str = ""  # what went wrong, if this is a span that failed
    state: bytes = b""
    is_sampled: bool = True
    link: TraceContext | None = None  # a trace that caused this one


class Root(NamedTuple):
    """The root of a request's own spans: its trace, whose child it is, and the id of its first span."""

    trace_id: str
    span_id: str
    parent_id: str
    is_sampled: bool
    state: bytes = b""
    is_random: bool = False
    link: TraceContext | None = None

    def child(self, span_id: str) -> TraceContext:
        """Returns what is sent on, to be gone on with by somebody else."""
        return TraceContext(self.trace_id, span_id, self.is_sampled, self.state, self.is_random)


class Sampling(NamedTuple):
    ratio: float = 1.0
    follows_parent: bool = True  # as sampled as a client's trace says
    continues: bool = True  # a client's trace is gone on with
    slow_ttft_s: float = 2.0
    slow_s: float = 60.0

    def keeps(self, root: Root, *, has_failed: bool, ttft_s: float | None, total_s: float | None) -> bool:
        """Whether the trace of a request that is over is kept."""
        return (
            root.is_sampled
            or has_failed
            or (ttft_s is not None and ttft_s >= self.slow_ttft_s)
            or (total_s is not None and total_s >= self.slow_s)
        )


class Roots:
    """Begins traces: a client's is gone on with, and who has none gets one."""

    def __init__(self, sampling: Sampling, random: Random | None = None) -> None:
        self.sampling = sampling
        self._random = random or Random()  # no secret hangs on it
        self._bound = round(sampling.ratio * (_LOW_56 + 1))

    def span_id(self) -> str:
        return f"{self._random.getrandbits(64) or 1:016x}"

    def begin(self, headers: Mapping[bytes, bytes], *, is_own: bool = False) -> Root:
        """`is_own`: they are of a trace that began here, and is gone on with whatever is done with a client's."""
        parent = headers.get(PARENT)
        if parent is not None:
            theirs = parse(parent, headers.get(STATE, b""))
            if theirs is not None:
                return self._continued(theirs) if is_own or self.sampling.continues else self._new(theirs)
        return self._new(None)

    def _continued(self, theirs: TraceContext) -> Root:
        trace_id, parent_id, is_sampled, state, is_random = theirs
        if not self.sampling.follows_parent:
            is_sampled = self._is_sampled(int(trace_id[18:], 16))
        return Root(trace_id, self.span_id(), parent_id, is_sampled, state, is_random)

    def _new(self, link: TraceContext | None) -> Root:
        number = self._random.getrandbits(128) or 1
        return Root(f"{number:032x}", self.span_id(), "", self._is_sampled(number & _LOW_56), b"", True, link)

    def _is_sampled(self, low: int) -> bool:
        """Whether a trace is sampled, told by its id, so that all who sample by it agree."""
        return low >= _LOW_56 + 1 - self._bound

"""W3C trace context: how a request says, in two headers, which trace it is part of. Pure; it makes no ids.

traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
tracestate: vendor=anything,other=more

What cannot be read is no context: a broken header never harms the request that has it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PARENT = b"traceparent"
STATE = b"tracestate"
_SAMPLED, _RANDOM = 1, 2
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_STATE_MEMBER = re.compile(
    rb"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_MEMBERS = 32
_MAX_STATE = 2048  # bytes; the least that must be passed on are 512


class TraceContext(NamedTuple):
    """The trace and the span whose child a span is."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    is_sampled: bool
    state: bytes = b""  # other vendors', passed on as it came
    is_random: bool = False  # the trace id's last seven bytes are

    def headers(self) -> bytes:
        """Returns the context as lines of a request."""
        flags = _SAMPLED * self.is_sampled | _RANDOM * self.is_random
        lines = f"traceparent: 00-{self.trace_id}-{self.span_id}-{flags:02x}\r\n".encode()
        return lines + b"tracestate: %b\r\n" % self.state if self.state else lines


def parse(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """None: there is none, or none that can be read."""
    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest is not None) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    bits = int(flags, 16)
    return TraceContext(
        trace_id.decode(),
        span_id.decode(),
        bool(bits & _SAMPLED),
        _checked(state) if state else b"",
        bool(bits & _RANDOM),
    )


def _checked(state: bytes) -> bytes:
    """All of it or, if it breaks the rules anywhere, nothing; of too many members the first."""
    members = [member for member in (part.strip(b" \t") for part in state.split(b",")) if member]
    if len(state) > _MAX_STATE or not all(map(_STATE_MEMBER.fullmatch, members)):
        return b""
    keys = [member.partition(b"=")[0] for member in members]
    if len(set(keys)) < len(keys):
        return b""
    return b",".join(members[:_MAX_MEMBERS])

"""Limits on how much, and how long, either side of the gateway is waited for."""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.25  # how often deadlines are looked at: one sweep over all connections is cheaper than a timer for each


@dataclass(frozen=True)
class ClientLimits:
    """Limits on clients, who may be slow, wrong or hostile."""

    max_head_bytes: int = 32 << 10  # request line and headers, each header with 32 bytes on top, so their number too
    max_body_bytes: int = 8 << 20
    max_arriving_bytes: int = 1 << 30  # of all bodies that have begun to arrive, by their declared lengths
    max_connections: int = 20_000
    handshake_timeout_s: float = 10.0  # from the connection to the end of its TLS handshake
    head_timeout_s: float = 10.0  # from a request's first byte (or the connection) to the end of its headers
    body_timeout_s: float = 60.0  # from there to the end of its body
    idle_timeout_s: float = 75.0  # between requests
    max_unsent_bytes: int = 64 << 10  # above it the upstream is not read; one more read may be on its way
    stall_timeout_s: float = 30.0  # a client that takes nothing for so long is dropped
    linger_s: float = 2.0  # after a refusal: what the client still sends is thrown away, so that it can read the answer


@dataclass(frozen=True)
class UpstreamLimits:
    """Limits on replicas and providers, who may be slow, hung or dead."""

    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0  # from the request to the first byte of the answer
    silence_timeout_s: float = (
        60.0  # between two reads of an answer; time in which the client was too slow is not counted
    )
    keep_alive_s: float = 30.0  # how long an unused connection is kept
    max_idle: int = 2048  # unused connections kept
    max_head_bytes: int = 64 << 10

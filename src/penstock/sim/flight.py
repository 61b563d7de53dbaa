"""Requests to a simulated fleet, and one of them on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.request import KvSource, Priority
from penstock.gateway.proxy.journey import Journey
from penstock.router.request import EdgeRequest


class Ask(NamedTuple):
    """One request: when it comes, how long it is, what its prompt begins with (see `prompts`)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    names: Sequence[int] = ()
    session: str | None = None
    tenant: str = ""
    priority: Priority = Priority.NORMAL


@dataclass(slots=True, eq=False)
class Flight:
    """`generated`: tokens that reached the client; what a replica that is lost had made since is lost with it."""

    ask: Ask
    number: int
    request: EdgeRequest
    journey: Journey
    replica: str = ""  # where it is; empty: at the gateway
    kv_source: KvSource | None = None  # that its replica pulls KV blocks of the prompt from
    first_s: float | None = None  # when its first token came
    cached_tokens: int = 0
    generated: int = 0
    moves: int = 0
    shed: str = ""  # why it was refused
    ended_s: float | None = None

"""Requests for a simulation: a trace so many times as fast, as often as one likes, read as they come.

A copy of a trace has prompts of its own and begins elsewhere in it, so that a thousand replicas see a thousand crowds
and not one crowd a thousand times.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator, Mapping, Sequence

from penstock.core.request import Priority
from penstock.sim.flight import Ask
from penstock.sim.profile import Profile
from penstock.workload.trace import Arrival

_GOLDEN = 0.6180339887498949


def replay(
    arrivals: Sequence[Arrival],
    speed: float = 1.0,
    *,
    copies: int = 1,
    tenants: int = 1,
    classes: Mapping[Priority, float] | None = None,
) -> Iterator[Ask]:
    """A session's requests all belong to one tenant and one class, which a hash of its name decides."""
    span_s = arrivals[-1].at_s + (arrivals[-1].at_s / max(1, len(arrivals) - 1))
    num_names = 1 + max((name for arrival in arrivals for name in arrival.blocks), default=0)
    streams = [_copy(arrivals, number, span_s, num_names, speed) for number in range(copies)]
    asks = heapq.merge(*streams, key=lambda ask: ask.at_s) if copies > 1 else streams[0]
    if tenants == 1 and classes is None:
        return asks
    return (_owned(ask, tenants, classes or {Priority.NORMAL: 1.0}) for ask in asks)


def speed_for(
    arrivals: Sequence[Arrival], profile: Profile, num_replicas: int, utilisation: float, copies: int = 1
) -> float:
    """Returns the speed at which the work of all requests, without any cache, is this share of the replicas' time."""
    each_s = (profile.request_work_s(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals)
    work_s = copies * sum(each_s)
    return utilisation * num_replicas * max(arrivals[-1].at_s, 1e-9) / work_s


def that_fit(arrivals: Sequence[Arrival], profile: Profile) -> list[Arrival]:
    """Returns the arrivals without those that no replica could ever take."""
    most = min(profile.max_context_tokens, profile.num_blocks * profile.block_tokens)
    return [one for one in arrivals if one.prompt_tokens + one.output_tokens <= most]


def _copy(arrivals: Sequence[Arrival], number: int, span_s: float, num_names: int, speed: float) -> Iterator[Ask]:
    """Yields the requests of a copy that runs from another moment of the trace on, around to that moment again."""
    began_s = number * _GOLDEN % 1.0 * span_s
    first = next((i for i, arrival in enumerate(arrivals) if arrival.at_s >= began_s), 0)
    shift = number * num_names
    for index in range(len(arrivals)):
        arrival = arrivals[(first + index) % len(arrivals)]
        at_s = (arrival.at_s - began_s) % span_s / speed
        names = tuple(name + shift for name in arrival.blocks) if shift else arrival.blocks
        session = f"{arrival.session}.{number}" if number else arrival.session
        yield Ask(at_s, arrival.prompt_tokens, arrival.output_tokens, names, session)


def _owned(ask: Ask, tenants: int, classes: Mapping[Priority, float]) -> Ask:
    luck = zlib.crc32((ask.session or "").encode())
    place, total = (luck >> 16) / (1 << 16), sum(classes.values())
    priority = Priority.NORMAL
    for candidate, share in classes.items():
        priority = candidate
        place -= share / total
        if place < 0:
            break
    return ask._replace(tenant=f"t{luck % tenants}", priority=priority)

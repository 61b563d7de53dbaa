"""A choice in a line: what `x-penstock-route` says.

    kv_aware;score=0.8312;least_loaded=0.4012;prefix=0.43;matched=6144;on_host=512;of=4;next="r2";next_score=0.61

A structured field (RFC 9651): the strategy, then its parameters. `score` is the winner's total and what follows it are
its parts, before weights; `matched` are tokens of the prompt that the replica holds, with `approximate` if that is a
guess; `on_host` of them are in its host memory only. `of` counts those that could have been picked, `dropped` those
that could not, by reason. `source` is the replica that KV blocks of the prompt are pulled from, `why` (prefill, prefix
or moved), `pulled` how many tokens and `gain` the seconds that this is expected to save; `alone` why there is none,
where there could be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from math import inf

from penstock.router.router import Choice


def route_header(choice: Choice, name: Callable[[str], str] = str) -> str:
    """`name`: what a replica is called towards clients, by its id."""
    picked = choice.replica
    if picked is None:
        return f"{choice.strategy};of=0{_dropped(choice)}"
    candidates, totals = choice.candidates, choice.totals
    at = 0
    while candidates[at] is not picked:
        at += 1
    line = f"{choice.strategy};score={totals[at]:.4g}"
    for scorer, scores in choice.scores.items():
        line += f";{scorer}={scores[at]:.4g}"
    if choice.matched_tokens:
        line += f";matched={choice.matched_tokens}{';approximate' if choice.is_approximate else ''}"
        line += f";on_host={choice.host_tokens}" if choice.host_tokens else ""
    if (source := choice.source) is not None:
        line += f';source="{_quoted(name(source.replica.id))}";why={source.reason};pulled={source.pulled_tokens}'
        line += f";gain={source.gain_s:.4g}"
    elif choice.alone is not None:
        line += f";alone={choice.alone}"
    line += f";of={len(totals)}"
    if choice.dropped:
        line += _dropped(choice)
    if len(totals) > 1:
        others = totals.copy()
        others[at] = -inf
        second = max(others)
        line += f';next="{_quoted(name(candidates[others.index(second)].id))}";next_score={second:.4g}'
    return line


def replica_header(choice: Choice, name: Callable[[str], str] = str) -> str:
    """Returns what `x-penstock-replica` says."""
    return _printable(name(choice.replica.id)) if choice.replica is not None else ""


def _dropped(choice: Choice) -> str:
    if not choice.dropped:
        return ""
    counts = Counter(choice.dropped.values())
    return f';dropped="{" ".join(f"{reason}:{count}" for reason, count in counts.items())}"'


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return _printable(text).replace("\\", "\\\\").replace('"', '\\"')


@lru_cache(maxsize=4096)
def _printable(text: str) -> str:
    """An id is an operator's word, and may not break a header."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]

"""A choice in a line: what `x-penstock-route` says.

    kv_aware;score=0.8312;least_loaded=0.4012;prefix=0.43;matched=6144;of=4;next="r2";next_score=0.61

A structured field (RFC 9651): the strategy, then its parameters. `score` is the winner's total and what follows it are
its parts, before weights; `matched` are tokens of the prompt that the replica holds, with `approximate` if that is a
guess; `of` counts those that could have been picked, `dropped` those that could not, by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.router.router import Choice


def route_header(choice: Choice, name: Callable[[str], str] = str) -> str:
    """`name`: what a replica is called towards clients, by its id."""
    picked = choice.replica
    if picked is None:
        return f"{choice.strategy};of=0{_dropped(choice)}"
    candidates, totals = choice.candidates, choice.totals
    at = next(i for i, candidate in enumerate(candidates) if candidate is picked)
    parts = "".join([f";{name}={scores[at]:.4g}" for name, scores in choice.scores.items()])
    matched = f";matched={choice.matched_tokens}" if choice.matched_tokens else ""
    if choice.matched_tokens and choice.is_approximate:
        matched += ";approximate"
    runner_up = ""
    if len(totals) > 1:
        second = max((i for i in range(len(totals)) if i != at), key=totals.__getitem__)
        runner_up = f';next="{_quoted(name(candidates[second].id))}";next_score={totals[second]:.4g}'
    return f"{choice.strategy};score={totals[at]:.4g}{parts}{matched};of={len(totals)}{_dropped(choice)}{runner_up}"


def replica_header(choice: Choice, name: Callable[[str], str] = str) -> str:
    """What `x-penstock-replica` says."""
    return _printable(name(choice.replica.id)) if choice.replica is not None else ""


def _dropped(choice: Choice) -> str:
    if not choice.dropped:
        return ""
    counts = Counter(choice.dropped.values())
    return f';dropped="{" ".join(f"{reason}:{count}" for reason, count in counts.items())}"'


def _quoted(text: str) -> str:
    return _printable(text).replace("\\", "\\\\").replace('"', '\\"')


def _printable(text: str) -> str:
    """An id is an operator's word, and may not break a header."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]

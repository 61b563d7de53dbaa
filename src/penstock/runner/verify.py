"""Drafts and what was chosen for their places: all rows of a step that a token is chosen from, and which of them count.

A row is chosen from as if all drafts before it held. All rows after the first draft that does not are void.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from penstock.sched.plan import Sampled, SampleSpec, Slice, StepResult


def choices(slices: Sequence[Slice]) -> list[SampleSpec]:
    """One per row of logits: for every slice that is sampled, that of its own last token and of each draft."""
    return [spec for planned in slices if planned.sample is not None for spec in (planned.sample, *planned.ahead)]


def newest_rows(slices: Sequence[Slice]) -> dict[str, int]:
    """Rows of the sequences' newest tokens, by request id. Sequences with drafts have none before they are read."""
    rows: dict[str, int] = {}
    row = 0
    for planned in slices:
        if planned.sample is not None:
            if not planned.ahead:
                rows[planned.request_id] = row
            row += 1 + len(planned.ahead)
    return rows


def outcome(slices: Sequence[Slice], rows: Sequence[Sampled]) -> StepResult:
    """`rows`: what was chosen from each, one token."""
    left = iter(rows)
    return StepResult(
        [None if s.sample is None else _held(s, next(left), left) if s.ahead else next(left) for s in slices]
    )


def _held(planned: Slice, first: Sampled, left: Iterator[Sampled]) -> Sampled:
    more = list(islice(left, len(planned.ahead)))
    found = [first]
    for draft, chosen in zip(planned.drafts, more, strict=True):
        if found[-1].token_ids[0] != draft:
            break
        found.append(chosen)
    logprobs = None if first.logprobs is None else list(chain.from_iterable(one.logprobs or () for one in found))
    return Sampled([one.token_ids[0] for one in found], logprobs)

"""A few tokens of one sequence, drafts above all, as slices of one token each: so they fit a step of decodes.

Each attends to those before it, which the step stores first: see `Batch.stores_first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from penstock.sched.plan import Slice

MAX_TOKENS = 32  # of a slice: a longer one is a prompt


def spread(slices: Sequence[Slice], most: int) -> list[Slice] | None:
    """All tokens one by one, or None where there are more than `most`."""
    if max(s.num_tokens for s in slices) > MAX_TOKENS or sum(s.num_tokens for s in slices) > most:
        return None
    return list(chain.from_iterable((s,) if s.num_tokens == 1 else _singles(s) for s in slices))


def _singles(planned: Slice) -> list[Slice]:
    before = planned.num_tokens - 1 - len(planned.ahead)
    specs = [*[None] * before, planned.sample, *planned.ahead]
    return [
        Slice(
            planned.request_id,
            planned.start + place,
            1,
            planned.token_ids[place : place + 1],  # empty: it is on the device still
            planned.block_ids,
            spec,
            planned.epoch,
            slot=planned.slot,
            images=planned.images,
        )
        for place, spec in enumerate(specs)
    ]

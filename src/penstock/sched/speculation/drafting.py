"""Tokens that somebody guessed, in a plan: added to slices that have room for them, and kept as far as they held.

A draft is computed with its sequence's last token, and what follows each is chosen as always. It holds if it is the
token that was chosen for its place; so an answer is the same with and without drafts, to the bit and to the random
number. Drafts that do not hold leave keys and values behind, which nobody reads and the next tokens overwrite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from penstock.sched.plan import Slice, StepPlan
from penstock.sched.sample_specs import choices_after
from penstock.sched.sequence import Sequence as LiveSequence

Drafts = Mapping[str, Sequence[int]]  # by request id


def decoding(running: Sequence[LiveSequence], *, once_read: bool = False) -> list[LiveSequence]:
    """Sequences that drafts may help in the next step, or once what is in flight is read. None, while there are prompts
    to compute: they fill a step too."""
    if any(sequence.num_wanted > 1 for sequence in running):
        return []
    return [s for s in running if s.may_draft or (once_read and s.will_draft)]


def room_of(sequence: LiveSequence) -> int:
    """Number of drafts that its output limit leaves room for: the token that is chosen anyway may be the last."""
    return max(0, sequence.request.max_tokens - sequence.num_generated - 1)


def attach(plan: StepPlan, drafts: Drafts, sequences: Mapping[str, LiveSequence], most: int) -> None:
    """Put drafts behind the decodes of a plan, up to `most` in all, unless there are prompts in it, which go first.
    Nobody gives up a block for them."""
    left = most if all(planned.num_tokens == 1 for planned in plan.slices) else 0
    for index, planned in enumerate(plan.slices):
        wanted = drafts.get(planned.request_id)
        if not wanted or planned.awaits_token or planned.sample is None:
            continue
        sequence = sequences[planned.request_id]
        count = min(len(wanted), room_of(sequence), left)
        table = sequence.table
        if count > 0 and table is not None and table.grow(planned.end + count):
            plan.slices[index] = _extended(planned, sequence, wanted[:count])
            left -= count


def _extended(planned: Slice, sequence: LiveSequence, drafts: Sequence[int]) -> Slice:
    assert planned.sample is not None
    sequence.has_drafts = True
    return replace(
        planned,
        num_tokens=planned.num_tokens + len(drafts),
        token_ids=[*planned.token_ids, *drafts],
        ahead=choices_after(sequence, planned.sample, drafts),
    )


def keep(sequence: LiveSequence, planned: Slice) -> int:
    """Counts, once a slice's tokens are taken, how many of its drafts are among them, and so are computed already."""
    sequence.has_drafts = False
    kept = 0
    for draft, token_id in zip(planned.drafts, sequence.token_ids[planned.end :], strict=False):
        if draft != token_id:
            break
        kept += 1
    if planned.epoch == sequence.epoch:  # the last token is never computed: the next one follows from it
        sequence.num_computed = min(planned.end + kept, len(sequence.token_ids) - 1)
    return kept

"""A sequence's part of a step: taken, and given back before the step goes out."""

from __future__ import annotations

from penstock.sched.plan import Slice, StepPlan
from penstock.sched.sample_specs import choice_of
from penstock.sched.sequence import Sequence


def take_slice(sequence: Sequence, count: int) -> Slice:
    """Its next `count` tokens, which count as computed from now on; with the last of them the next one is chosen."""
    assert sequence.table is not None
    start = sequence.num_computed
    sequence.table.keep_state(start, sequence.hashes)
    end = start + count
    known = len(sequence.token_ids)
    sample = choice_of(sequence) if end == known + sequence.num_in_flight else None
    sliced = Slice(
        request_id=sequence.request.id,
        start=start,
        num_tokens=count,
        token_ids=sequence.token_ids[start : min(end, known)],
        block_ids=sequence.table.block_ids,
        sample=sample,
        epoch=sequence.epoch,
        slot=sequence.slot,
        images=sequence.request.images,
        state_slot=sequence.table.state_slot,
    )
    sequence.num_computed = end
    if sample is not None:
        sequence.num_in_flight += 1
    return sliced


def withdraw(plan: StepPlan, sequence: Sequence) -> int:
    """Take what is planned for a sequence out of the plan again; what that would have cost."""
    for index, planned in enumerate(plan.slices):
        if planned.request_id == sequence.request.id:
            sequence.num_in_flight -= planned.sample is not None
            del plan.slices[index]
            return cost_of(planned)
    return 0


def cost_of(planned: Slice) -> int:
    """Cost of a slice as `fairness` counts: a prompt's token is computed, one of an answer is computed and chosen."""
    return planned.num_tokens + (planned.sample is not None)

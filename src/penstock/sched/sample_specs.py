"""Sample specs of a sequence's next token, and of those after it if what was drafted for them holds."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sched.plan import SampleSpec
from penstock.sched.sequence import Sequence as LiveSequence


def choice_of(sequence: LiveSequence) -> SampleSpec:
    """Sample spec of the token after all that are known or in flight."""
    request, guide = sequence.request, sequence.guide
    generated = sequence.num_generated + sequence.num_in_flight
    return SampleSpec(
        params=request.sampling,
        history=tuple(sequence.token_ids) if request.sampling.looks_back else (),
        prompt_len=sequence.prompt_len,
        position=sequence.prompt_len + generated,
        banned_ids=request.stop_token_ids if generated < request.min_tokens and guide is None else (),
        mask=guide,
    )


def choices_after(sequence: LiveSequence, first: SampleSpec, drafts: Sequence[int]) -> list[SampleSpec]:
    """Sample specs of the token after each draft. They are chosen as if every draft before them had been: by the random
    number of their own place, and by what may come there."""
    request = sequence.request
    masks = sequence.guide.ahead(drafts) if sequence.guide is not None else [None] * len(drafts)
    choices = []
    for count, mask in enumerate(masks, 1):
        is_early = first.position - sequence.prompt_len + count < request.min_tokens
        choices.append(
            SampleSpec(
                params=first.params,
                history=(*first.history, *drafts[:count]) if first.params.looks_back else (),
                prompt_len=first.prompt_len,
                position=first.position + count,
                banned_ids=request.stop_token_ids if is_early and mask is None else (),
                mask=mask,
            )
        )
    return choices

"""Slices with drafts, one token at a time: the same tokens in the same places, and a choice after each that has one."""

from __future__ import annotations

import torch

from penstock.core.sampling import SamplingParams
from penstock.runner.rows import MAX_TOKENS, spread
from penstock.runner.step_inputs import Inputs, Sizes, as_batch, write
from penstock.runner.verify import choices, newest_rows
from penstock.sched.plan import SampleSpec, Slice
from tests.runner.reference_batch import reference_batch


def spec(position: int) -> SampleSpec:
    return SampleSpec(SamplingParams(), history=(), prompt_len=1, position=position)


PLAIN = Slice("a", 9, 1, [7], [3, 1], spec(10), epoch=0, slot=2)
DRAFTED = Slice("b", 4, 3, [50, 51, 52], [5, 9], spec(5), epoch=1, ahead=[spec(6), spec(7)], slot=0)
SHORT = Slice("c", 2, 2, [20], [6], spec(4), epoch=0)  # its last token is on the device
PROMPT = Slice("d", 0, 4, [1, 2, 3, 4], [8], None, epoch=0)
SLICES = [PLAIN, DRAFTED, SHORT]


def test_tokens_stand_one_by_one_where_they_stood_together() -> None:
    found = spread(SLICES, 6)
    assert found is not None
    assert [s.request_id for s in found] == list("abbbcc")
    assert [s.start for s in found] == [9, 4, 5, 6, 2, 3]
    assert [list(s.token_ids) for s in found] == [[7], [50], [51], [52], [20], []]
    assert [s.awaits_token for s in found] == [False] * 5 + [True]
    assert [s.sample and s.sample.position for s in found] == [10, 5, 6, 7, None, 4]
    assert [s.slot for s in found] == [2, 0, 0, 0, None, None]
    assert [s.sample for s in found if s.sample is not None] == choices(SLICES)
    assert all(not s.ahead and s.num_tokens == 1 for s in found)


def test_what_is_long_or_too_much_is_left_together() -> None:
    assert spread(SLICES, 5) is None
    assert spread([Slice("p", 0, MAX_TOKENS + 1, [0] * (MAX_TOKENS + 1), [1] * 9, spec(33), 0)], 1000) is None


def test_the_newest_token_of_who_has_drafts_is_on_no_row() -> None:
    assert newest_rows([PLAIN, DRAFTED, PROMPT, SHORT]) == {"a": 0, "c": 4}


def test_batch_with_drafts_in_it_is_the_one_that_was_planned() -> None:
    slices = [PLAIN, DRAFTED, PROMPT]
    expected = reference_batch(slices, torch.device("cpu"))
    sizes = Sizes(tokens=8, sequences=3, rows=4, width=2)
    buffer = torch.zeros(sizes.total, dtype=torch.int32)
    assert write(Inputs.views(buffer.numpy(), sizes), slices, {}) == 1
    found = as_batch(Inputs.views(buffer, sizes), torch.zeros(8, dtype=torch.int32), 1)
    for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_rows_that_nobody_chooses_from_are_padding_within_the_batch() -> None:
    """As where a short slice is spread: its first token is computed, and not chosen after."""
    singles = spread([SHORT], 2)
    assert singles is not None
    sizes = Sizes(tokens=2, sequences=2, rows=2, width=1, stores_first=True)
    buffer = torch.full((sizes.total,), 77, dtype=torch.int32)
    write(Inputs.views(buffer.numpy(), sizes), singles, {"c": 1})
    batch = as_batch(Inputs.views(buffer, sizes), torch.tensor([60, 61], dtype=torch.int32), 2)
    assert batch.token_ids.tolist() == [20, 61]
    assert batch.logit_rows.tolist() == [1, 1]

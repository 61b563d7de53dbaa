from __future__ import annotations

import torch

from penstock.core.sampling import SamplingParams
from penstock.model.batch import Batch
from penstock.runner.step_inputs import host_batch, pack
from penstock.sched.plan import SampleSpec, Slice, StepPlan

SPEC = SampleSpec(SamplingParams(), history=(), prompt_len=1, position=1)


def planned(start: int, token_ids: list[int], block_ids: list[int], *, samples: bool) -> Slice:
    return Slice("r", start, len(token_ids), token_ids, block_ids, SPEC if samples else None, epoch=0)


def build_batch(slices: list[Slice], device: torch.device) -> Batch:
    return host_batch(pack(StepPlan(slices)), device)


def test_chunks_and_decodes_lie_end_to_end_in_one_batch() -> None:
    batch = build_batch(
        [
            planned(9, [7], [3, 1, 4], samples=True),
            planned(4, [10, 11, 12], [5, 9], samples=False),
            planned(0, [20, 21], [6], samples=True),
        ],
        torch.device("cpu"),
    )
    assert batch.token_ids.tolist() == [7, 10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [9, 4, 5, 6, 0, 1]
    assert batch.query_starts.tolist() == [0, 1, 4, 6]
    assert batch.context_lens.tolist() == [10, 7, 2]
    assert batch.block_tables.tolist() == [[3, 1, 4], [5, 9, 0], [6, 0, 0]]
    assert batch.logit_rows.tolist() == [0, 5]  # the chunk in the middle is not its prompt's last


def test_types_are_those_that_kernels_read() -> None:
    batch = build_batch([planned(0, [1], [0], samples=True)], torch.device("cpu"))
    indexes = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
    assert {tensor.dtype for tensor in indexes} == {torch.int32}
    assert all(tensor.is_contiguous() for tensor in indexes)
    assert batch.logit_rows.dtype == torch.int64


def test_a_step_of_unfinished_prompts_wants_no_logits() -> None:
    batch = build_batch([planned(0, [1, 2], [0], samples=False)], torch.device("cpu"))
    assert batch.logit_rows.tolist() == []
    assert (batch.num_tokens, batch.num_sequences) == (2, 1)

"""What is written into the one buffer is, on the device, the batch that the CPU's runner would have built."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch

from penstock.core.sampling import SamplingParams
from penstock.runner.sharing import Room
from penstock.runner.step_inputs import Inputs, Sizes, as_batch, write
from penstock.sched.plan import SampleSpec, Slice
from tests.runner.reference_batch import reference_batch

SPEC = SampleSpec(SamplingParams(), history=(), prompt_len=1, position=1)
SAMPLED = torch.tensor([50, 51, 52], dtype=torch.int32)


def planned(name: str, start: int, token_ids: list[int], block_ids: list[int], *, in_flight: bool = False) -> Slice:
    return Slice(name, start, len(token_ids) + in_flight, token_ids, block_ids, SPEC, epoch=0)


SLICES = [
    planned("a", 9, [7], [3, 1, 4]),
    planned("b", 4, [51], [5, 9]),
    planned("c", 2, [20, 21, 52], [6]),
]
IN_FLIGHT = [
    SLICES[0],
    planned("b", 4, [], [5, 9], in_flight=True),
    planned("c", 2, [20, 21], [6], in_flight=True),
]
SIZES = Sizes(tokens=5, sequences=3, rows=3, width=3, sharing=Room(8, tile=4, wanted=5))


def test_batch_is_the_one_that_was_planned_also_with_tokens_in_flight() -> None:
    expected = reference_batch(SLICES, torch.device("cpu"))
    for slices in (SLICES, IN_FLIGHT):
        buffer = torch.zeros(SIZES.total, dtype=torch.int32)
        num_decodes = write(Inputs.views(buffer.numpy(), SIZES), slices, {"b": 1, "c": 2})
        assert num_decodes == 2
        found = as_batch(Inputs.views(buffer, replace(SIZES, sharing=None)), SAMPLED, num_decodes)
        for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "logit_rows"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert found.shared is None


def test_padding_has_no_context_and_a_row_of_its_own() -> None:
    sizes = Sizes(tokens=4, sequences=4, rows=4, width=3)
    buffer = torch.full((sizes.total,), 77, dtype=torch.int32)
    write(Inputs.views(buffer.numpy(), sizes), SLICES[:2], {})
    batch = as_batch(Inputs.views(buffer, sizes), SAMPLED, 4)
    assert batch.token_ids.tolist() == [7, 51, 0, 0]
    assert batch.context_lens.tolist() == [10, 5, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3]


def test_what_is_shared_lies_behind_the_rest() -> None:
    alone = replace(SIZES, sharing=None)
    buffer = np.arange(SIZES.total, dtype=np.int32)
    inputs = Inputs.views(buffer, SIZES)
    assert [part.shape for part in inputs.shared] == [(8, 3), (3, 4), (8, 3)]
    assert min(int(part.min()) for part in inputs.shared) == alone.total
    assert np.array_equal(inputs.block_tables, Inputs.views(buffer, alone).block_tables)
    batch = as_batch(Inputs.views(torch.zeros(SIZES.total, dtype=torch.int32), SIZES), SAMPLED, 2)
    assert batch.shared is not None
    assert batch.shared.tiles.shape == (3, 4)


def test_every_token_has_the_slot_of_its_sequence_and_padding_none() -> None:
    slices = [msgspec.structs.replace(s, slot=slot) for s, slot in zip(SLICES, (3, None, 1), strict=True)]
    sizes = replace(SIZES, tokens=7, sequences=5, adapted=True)
    buffer = torch.full((sizes.total,), 77, dtype=torch.int32)
    num_decodes = write(Inputs.views(buffer.numpy(), sizes), slices, {})
    batch = as_batch(Inputs.views(buffer, sizes), SAMPLED, num_decodes)
    assert batch.slots is not None
    assert batch.slots.tolist() == [3, -1, 1, 1, 1, -1, -1]
    assert batch.shared is not None
    found = reference_batch(slices, torch.device("cpu"))
    assert [(group.slot, group.rows.tolist()) for group in found.adapters] == [(1, [2, 3, 4]), (3, [0])]
    plain = replace(sizes, adapted=False)
    assert Inputs.views(buffer, plain).slots is None
    assert torch.equal(Inputs.views(buffer, plain).block_tables, Inputs.views(buffer, sizes).block_tables)

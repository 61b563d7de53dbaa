"""The batch of a plan's slices, built slice by slice without a buffer: what packed inputs must come to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from penstock.model.batch import Batch, SlotRows
from penstock.sched.plan import Slice


def reference_batch(slices: list[Slice], device: torch.device) -> Batch:
    lengths = [s.num_tokens for s in slices]
    starts = [0, *accumulate(lengths)]
    token_ids = np.empty(starts[-1], np.int32)
    positions = np.empty(starts[-1], np.int32)
    tables = np.zeros((len(slices), max(len(s.block_ids) for s in slices)), np.int32)
    for row, (begin, length, planned) in enumerate(zip(starts, lengths, slices, strict=False)):
        token_ids[begin : begin + length] = planned.token_ids
        positions[begin : begin + length] = range(planned.start, planned.start + length)
        tables[row, : len(planned.block_ids)] = planned.block_ids
    contexts = np.array([s.start + s.num_tokens for s in slices], np.int32)
    rows = [
        row
        for end, planned in zip(starts[1:], slices, strict=True)
        if planned.sample is not None
        for row in range(end - 1 - len(planned.ahead), end)
    ]
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.from_numpy(contexts).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        num_decodes=sum(length == 1 for length in lengths),
        adapters=_slot_rows(slices, starts, device),
    )


def _slot_rows(slices: Sequence[Slice], starts: Sequence[int], device: torch.device) -> tuple[SlotRows, ...]:
    rows: dict[int, list[int]] = {}
    for begin, planned in zip(starts, slices, strict=False):
        if planned.slot is not None:
            rows.setdefault(planned.slot, []).extend(range(begin, begin + planned.num_tokens))
    return tuple(
        SlotRows(slot, torch.tensor(found, dtype=torch.int64, device=device)) for slot, found in sorted(rows.items())
    )

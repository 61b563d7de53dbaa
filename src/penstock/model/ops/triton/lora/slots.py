"""Slots of LoRA adapters in device memory, for any number of them and any ranks: all adapters of a step, at one linear,
are two kernels (`shrink_expand`). The bus is the limit of an adapter's way there: 84 MB take 1.5 ms
(docs/benchmarks.md, Adapters).

Every slot is a piece of memory of one size, set aside before the KV cache is made: as much as an adapter of the largest
rank that was asked for takes on every linear layer. An adapter lies in it without gaps, so one of fewer layers may have
larger ranks. It waits in page-locked host memory as it will lie there, and comes in one copy that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.model.batch import Batch
from penstock.model.lora_slots import HostPair, HostPairs
from penstock.model.ops import Ops
from penstock.model.ops.triton.lora.shrink_expand import MAX_PARTS, UNIT, Pairs, add_few, add_many, entries_of
from penstock.model.weights import Site


@dataclass(frozen=True)
class PackedAdapter:
    values: Tensor  # [numbers]
    table: Tensor  # [parts of all sites, 4] int32: see `shrink_expand.Pairs`; of a slot that begins at 0


class TritonSlots:
    def __init__(self, ops: Ops, sites: Sequence[Site], num_slots: int, max_rank: int) -> None:
        self._shapes = [(site.inputs, tuple(site.outputs.values())) for site in sites]
        assert all(len(outputs) <= MAX_PARTS for _, outputs in self._shapes)
        self._first_parts = _sums_before(len(outputs) for _, outputs in self._shapes)
        self._max_rank, self._is_pinned = max_rank, ops.device.type == "cuda"
        self._room = sum(
            _whole_units(max_rank * inputs) + _whole_units(max_rank * size)
            for inputs, outputs in self._shapes
            for size in outputs
        )
        self._values = torch.zeros(num_slots, self._room, dtype=ops.activation_dtype, device=ops.device)
        num_parts = sum(len(outputs) for _, outputs in self._shapes)
        self._table = torch.zeros(num_slots + 1, num_parts, 4, dtype=torch.int32, device=ops.device)
        self._pairs = [
            Pairs(self._values, self._table, first, inputs, outputs)
            for first, (inputs, outputs) in zip(self._first_parts, self._shapes, strict=True)
        ]
        self._slots, self._entries = self._table.new_empty(0), self._table[:0]

    def prepared(self, pairs: HostPairs) -> PackedAdapter:
        table = torch.zeros(self._table.shape[1:], dtype=torch.int32, pin_memory=self._is_pinned)
        matrices: list[Tensor] = []
        end = 0
        for site, pair in pairs.items():
            for part, a, b in self._parts(site, pair):
                middle = end + _whole_units(a.numel())
                table[part] = torch.tensor([end // UNIT, middle // UNIT, a.shape[0], 0])
                end = middle + _whole_units(b.numel())
                matrices += (a, b)
        if end > self._room:
            raise ModelUnsupported(
                f"the adapter has {end:,} numbers, and a place on the GPU has room for {self._room:,}: as many as "
                f"rank {self._max_rank} on every linear layer takes; raise max_lora_rank"
            )
        values = torch.empty(end, dtype=self._values.dtype, pin_memory=self._is_pinned)
        start = 0
        for each in matrices:
            values[start : start + each.numel()].view_as(each).copy_(each)
            start += _whole_units(each.numel())
        return PackedAdapter(values, table)

    def _parts(self, site: int, pair: HostPair) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Number of each part among all, and its A and B as they are stored."""
        starts = _sums_before(self._shapes[site][1])
        for b, scale, rank, column in pair.parts:
            part = self._first_parts[site] + starts.index(column)
            yield part, pair.a[rank : rank + b.shape[1]], b.T.contiguous().float() * scale

    def place(self, slot: int, adapter: PackedAdapter) -> None:
        """On the stream of the steps: what was launched before still reads what lay there, what follows reads this."""
        self._values[slot, : len(adapter.values)].copy_(adapter.values, non_blocking=True)
        self._table[slot].copy_(adapter.table, non_blocking=True)
        self._table[slot, :, :2] += slot * self._room // UNIT

    def clear(self, slot: int) -> None:
        self._table[slot].zero_()

    def begin(self, batch: Batch) -> None:
        slots = batch.slots if batch.slots is not None else _slots_of(batch)
        self._entries = entries_of(self._table, slots[: batch.num_decodes])
        self._slots = slots[batch.num_decodes :]

    def add(self, site: int, x: Tensor, y: Tensor) -> None:
        assert y.is_contiguous()
        x, count, pairs = x.contiguous(), len(self._entries), self._pairs[site]
        if count:
            add_few(x[:count], y[:count], self._entries, pairs)
        if count < x.shape[0]:
            add_many(x[count:], y[count:], self._slots, pairs)


def _slots_of(batch: Batch) -> Tensor:
    slots = torch.full((batch.num_tokens,), -1, dtype=torch.int32, device=batch.token_ids.device)
    for group in batch.adapters:
        slots[group.rows] = group.slot
    return slots


def _whole_units(count: int) -> int:
    return -(-count // UNIT) * UNIT


def _sums_before(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]

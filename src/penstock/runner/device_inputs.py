"""A step's integers on their way to the device: written into one buffer, so that they travel in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.model.batch import Batch, SharedPrefixes
from penstock.runner.sharing import Ints, Room
from penstock.sched.plan import Slice

Array = TypeVar("Array", Tensor, Ints)  # on the device; on the host


@dataclass(frozen=True)
class Sizes:
    tokens: int
    sequences: int
    rows: int
    width: int  # of block tables
    sharing: Room | None = None  # comes last: the rest lies where it would without it
    stores_first: bool = False  # see Batch
    adapted: bool = False  # some have adapters

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        sequences = self.sequences
        flat = (self.tokens,), (self.tokens,), (self.tokens,), (sequences + 1,), (sequences,), (self.rows,)
        shared = self.sharing.shapes if self.sharing else ()
        slots = ((self.tokens,),) if self.adapted else ()
        return *flat, (sequences, self.width), *slots, *shared

    @property
    def total(self) -> int:
        return sum(map(prod, self.shapes))


@dataclass(frozen=True)
class Inputs(Generic[Array]):
    """Views of the buffer."""

    token_ids: Array  # [tokens]
    positions: Array  # [tokens]
    sources: Array  # [tokens]: the row of the step before that sampled this token; -1: it is in token_ids
    query_starts: Array  # [sequences + 1]
    context_lens: Array  # [sequences]
    logit_rows: Array  # [rows]
    block_tables: Array  # [sequences, width]
    slots: Array | None  # [tokens]: where each one's adapter lies; -1: it has none
    shared: tuple[Array, ...]  # what SharedPrefixes is made of; empty: there is no room for it

    @classmethod
    def views(cls, buffer: Array, sizes: Sizes) -> Inputs[Array]:
        ends = accumulate(map(prod, sizes.shapes))
        parts = [buffer[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, sizes.shapes, strict=True)]
        token_ids, positions, sources, query_starts, context_lens, logit_rows, block_tables = parts[:7]
        slots, shared = (parts[7], tuple(parts[8:])) if sizes.adapted else (None, tuple(parts[7:]))
        return cls(token_ids, positions, sources, query_starts, context_lens, logit_rows, block_tables, slots, shared)


def as_batch(inputs: Inputs[Tensor], sampled: Tensor, num_decodes: int) -> Batch:
    """Fill in the tokens that never left the device."""
    flown = sampled[inputs.sources.clamp(min=0)]
    token_ids = torch.where(inputs.sources >= 0, flown, inputs.token_ids)
    return Batch(
        token_ids,
        inputs.positions,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables,
        inputs.logit_rows.long(),
        num_decodes,
        SharedPrefixes(*inputs.shared) if inputs.shared else None,
        slots=inputs.slots,
    )


def write(host: Inputs[Ints], slices: Sequence[Slice], rows: Mapping[str, int]) -> int:
    """All but what is shared; what is beyond the slices becomes padding. Returns how many decodes come first.

    `rows` tells where each sequence's newest token was sampled.
    """
    starts = [0, *accumulate(s.num_tokens for s in slices)]
    num_tokens, count = starts[-1], len(slices)
    host.query_starts[:count] = starts[:-1]
    host.context_lens[:count] = [s.start + s.num_tokens for s in slices]
    # Decodes come first, and there may be hundreds: all of them at once. Chunks are long, and few.
    singles = next((i for i, s in enumerate(slices) if s.num_tokens > 1), count)
    ones = slices[:singles]
    sampled = [row for row, planned in enumerate(ones) if planned.sample is not None]
    host.token_ids[:singles] = [s.token_ids[0] if s.token_ids else 0 for s in ones]
    host.sources[:singles] = [-1 if s.token_ids else rows[s.request_id] for s in ones]
    host.positions[:singles] = [s.start for s in ones]
    for begin, planned in zip(starts[singles:], slices[singles:], strict=False):
        _write_chunk(host, begin, planned, rows)
        if planned.sample is not None:
            end = begin + planned.num_tokens
            sampled += range(end - 1 - len(planned.ahead), end)
    host.logit_rows[: len(sampled)] = sampled
    for row, planned in zip(host.block_tables, slices, strict=False):
        row[: len(planned.block_ids)] = planned.block_ids
    if host.slots is not None:
        _write_slots(host.slots, slices)
    _pad(host, num_tokens, count, len(sampled))
    return singles


def _write_chunk(host: Inputs[Ints], begin: int, planned: Slice, rows: Mapping[str, int]) -> None:
    end, known = begin + planned.num_tokens, begin + len(planned.token_ids)
    host.token_ids[begin:known] = planned.token_ids
    host.sources[begin:known] = -1
    if planned.awaits_token:
        host.token_ids[known] = 0
        host.sources[known] = rows[planned.request_id]
    host.positions[begin:end] = np.arange(planned.start, planned.start + planned.num_tokens)


def _write_slots(host: Ints, slices: Sequence[Slice]) -> None:
    host[:] = -1
    begin = 0
    for planned in slices:
        end = begin + planned.num_tokens
        if planned.slot is not None:
            host[begin:end] = planned.slot
        begin = end


def _pad(host: Inputs[Ints], tokens: int, sequences: int, rows: int) -> None:
    """Sequences of no context, one token each, which the kernels pass over."""
    host.token_ids[tokens:] = 0
    host.sources[tokens:] = -1
    host.positions[tokens:] = 0
    host.context_lens[sequences:] = 0
    missing = len(host.query_starts) - sequences
    host.query_starts[sequences:] = range(tokens, tokens + missing)
    # Any row will do: nobody looks at what comes of it.
    host.logit_rows[rows:] = np.minimum(
        np.arange(tokens, tokens + len(host.logit_rows) - rows), len(host.token_ids) - 1
    )

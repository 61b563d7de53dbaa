"""A step's inputs: what a runner needs of a plan to run the model, packed into one buffer of integers.

The buffer goes to the device in one copy, and could as well go to another rank: `StepInputs` holds no object of the
scheduler and travels as bytes. The choice of tokens is sent apart (`encode_choices`), when it is known: a mask may
depend on the step before, and only the rank that chooses needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.core.images import FIRST_IMAGE_TOKEN
from penstock.core.sampling import SamplingParams
from penstock.model.batch import Batch, BatchStates, ImageRows, LayerState, SharedPrefixes, SlotRows
from penstock.runner.images import StepImages, image_parts, mrope_positions
from penstock.runner.sharing import Ints, Room
from penstock.sched.plan import SampleSpec, Slice, StepPlan

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
    mrope: bool = False  # tokens are rotated in three directions: see `model.mrope`
    recurrent: bool = False  # sequences have states: see `model.states`

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        sequences = self.sequences
        flat = (self.tokens,), (self.tokens,), (self.tokens,), (sequences + 1,), (sequences,), (self.rows,)
        shared = self.sharing.shapes if self.sharing else ()
        slots = ((self.tokens,),) if self.adapted else ()
        mrope = ((3, self.tokens),) if self.mrope else ()
        states = ((sequences,),) if self.recurrent else ()
        return *flat, (sequences, self.width), *slots, *mrope, *states, *shared

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
    mrope_positions: Array | None  # [3, tokens]: time, row and column that each is rotated by
    state_slots: Array | None  # [sequences]: where the recurrent state of each lies; padding's is 0
    shared: tuple[Array, ...]  # what SharedPrefixes is made of; empty: there is no room for it

    @classmethod
    def views(cls, buffer: Array, sizes: Sizes) -> Inputs[Array]:
        ends = accumulate(map(prod, sizes.shapes))
        parts = [buffer[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, sizes.shapes, strict=True)]
        rest = parts[7:]
        slots = rest.pop(0) if sizes.adapted else None
        mrope = rest.pop(0) if sizes.mrope else None
        state_slots = rest.pop(0) if sizes.recurrent else None
        token_ids, positions, sources, query_starts, context_lens, logit_rows, block_tables = parts[:7]
        flat = token_ids, positions, sources, query_starts, context_lens, logit_rows, block_tables
        return cls(*flat, slots, mrope, state_slots, tuple(rest))


@dataclass(frozen=True)
class StepInputs:
    """One step for any rank: plain numbers, and the buffer that `sizes` lays out."""

    sizes: Sizes
    ints: Ints  # [sizes.total]
    num_decodes: int  # sequences that bring one token, padding included
    num_rows: int  # of logits that a token is chosen from; the rest is padding
    is_captured: bool = False  # it is replayed as a graph of its sizes
    copies: Sequence[tuple[int, int]] = ()  # as in the plan
    placements: Sequence[tuple[int, str]] = ()  # likewise
    images: StepImages = StepImages()  # noqa: RUF009 (frozen)
    state_copies: Sequence[tuple[int, int]] = ()  # as in the plan

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            _Message(
                self.sizes,
                self.ints.tobytes(),
                self.num_decodes,
                self.num_rows,
                self.is_captured,
                list(self.copies),
                list(self.placements),
                self.images,
                list(self.state_copies),
            )
        )

    @classmethod
    def decode(cls, message: bytes) -> StepInputs:
        sizes, ints, *rest = msgspec.structs.astuple(_DECODER.decode(message))
        return cls(sizes, np.frombuffer(ints, np.int32).copy(), *rest)


class _Message(msgspec.Struct, array_like=True):
    """`StepInputs` on the wire."""

    sizes: Sizes
    ints: bytes
    num_decodes: int
    num_rows: int
    is_captured: bool
    copies: list[tuple[int, int]]
    placements: list[tuple[int, str]]
    images: StepImages
    state_copies: list[tuple[int, int]]


_DECODER = msgspec.msgpack.Decoder(_Message)


def images_of(plan: StepPlan, slices: Sequence[Slice]) -> StepImages:
    """`slices`: of the plan, in the order of their rows."""
    return StepImages(plan.drops, plan.encodes, image_parts(slices))


def pack(plan: StepPlan, merge_size: int = 0, *, recurrent: bool = False) -> StepInputs:
    """A plan whose tokens are all known to the host, in a buffer that is no larger than it needs. `merge_size`: of the
    images of a model whose tokens are rotated in three directions; 0: they are not. `recurrent`: of a model whose
    sequences have states."""
    slices = plan.slices
    rows = sum(1 + len(s.ahead) for s in slices if s.sample is not None)
    width = max(len(s.block_ids) for s in slices)
    is_adapted = any(s.slot is not None for s in slices)
    sizes = Sizes(
        plan.num_tokens, len(slices), rows, width, adapted=is_adapted, mrope=merge_size > 0, recurrent=recurrent
    )
    ints = np.zeros(sizes.total, np.int32)
    write(Inputs.views(ints, sizes), slices, {}, merge_size)
    num_decodes, images = sum(s.num_tokens == 1 for s in slices), images_of(plan, slices)
    return StepInputs(
        sizes,
        ints,
        num_decodes,
        rows,
        copies=plan.copies,
        placements=plan.placements,
        images=images,
        state_copies=plan.state_copies,
    )


def host_batch(
    step: StepInputs, device: torch.device, images: ImageRows | None = None, states: Sequence[LayerState] = ()
) -> Batch:
    """The batch of a device that shares the host's memory, or is sent every tensor by itself. `states`: of all
    sequences, where they have some."""
    inputs = Inputs.views(step.ints, step.sizes)

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        tensor(inputs.token_ids),
        tensor(inputs.positions),
        tensor(inputs.query_starts),
        tensor(inputs.context_lens),
        tensor(inputs.block_tables),
        tensor(inputs.logit_rows).long(),
        step.num_decodes,
        adapters=_slot_rows(inputs.slots, device) if inputs.slots is not None else (),
        images=images,
        mrope_positions=tensor(inputs.mrope_positions) if inputs.mrope_positions is not None else None,
        states=BatchStates(tensor(inputs.state_slots), states) if inputs.state_slots is not None else None,
    )


def _slot_rows(slots: Ints, device: torch.device) -> tuple[SlotRows, ...]:
    """The rows of each slot that has some."""
    used = [int(slot) for slot in np.unique(slots) if slot >= 0]
    return tuple(SlotRows(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(device)) for slot in used)


def as_batch(inputs: Inputs[Tensor], sampled: Tensor, num_decodes: int, states: Sequence[LayerState] = ()) -> Batch:
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
        mrope_positions=inputs.mrope_positions,
        states=BatchStates(inputs.state_slots, states) if inputs.state_slots is not None else None,
    )


def write(host: Inputs[Ints], slices: Sequence[Slice], rows: Mapping[str, int], merge_size: int = 0) -> int:
    """All but what is shared; what is beyond the slices becomes padding. Returns how many decodes come first.

    `rows` tells where each sequence's newest token was sampled; `merge_size` is as in `pack`.
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
    if any(s.images for s in slices):  # their embeddings are put in later, and there are none to look up
        host.token_ids[:num_tokens][host.token_ids[:num_tokens] >= FIRST_IMAGE_TOKEN] = 0
    if host.mrope_positions is not None:
        _write_mrope_positions(host.mrope_positions, host.positions, slices, merge_size)
    if host.state_slots is not None:
        host.state_slots[:count] = [s.state_slot or 0 for s in slices]
        host.state_slots[count:] = 0
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


def _write_mrope_positions(host: Ints, positions: Ints, slices: Sequence[Slice], merge_size: int) -> None:
    host[:] = positions
    begin = 0
    for planned in slices:
        end = begin + planned.num_tokens
        if planned.images:
            host[:, begin:end] = mrope_positions(planned, merge_size)
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


class _Choice(msgspec.Struct, array_like=True):
    """`SampleSpec` on the wire."""

    params: SamplingParams
    history: list[int]
    prompt_len: int
    position: int
    banned_ids: list[int]
    mask: bytes | None


class MaskBits(NamedTuple):
    """A mask that has been made."""

    value: bytes

    def bits(self) -> bytes:
        return self.value


_CHOICES = msgspec.msgpack.Decoder(list[_Choice])


def encode_choices(specs: Sequence[SampleSpec]) -> bytes:
    """Encodes how each row's token is chosen. It waits for masks that are still being made."""
    return msgspec.msgpack.encode(
        [
            _Choice(
                spec.params,
                list(spec.history),
                spec.prompt_len,
                spec.position,
                list(spec.banned_ids),
                spec.mask.bits() if spec.mask is not None else None,
            )
            for spec in specs
        ]
    )


def decode_choices(message: bytes) -> list[SampleSpec]:
    return [
        SampleSpec(
            one.params,
            one.history,
            one.prompt_len,
            one.position,
            one.banned_ids,
            MaskBits(one.mask) if one.mask is not None else None,
        )
        for one in _CHOICES.decode(message)
    ]

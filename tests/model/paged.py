"""Drives a model over a paged cache without an engine: token lists and block tables in, logits out.

Any test of `model` or of an `Ops` can use it; blocks are scattered on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.batch import Batch, BatchStates, LayerState
from penstock.model.layers import CausalLM
from penstock.model.ops import KVShape, LayerKV, Ops
from penstock.model.sequence import TokenSplit
from penstock.model.shard import Shard
from penstock.model.stages import Stage
from penstock.model.states import StateShape, state_shape

NUM_STATES = 8  # slots of recurrent states


@dataclass
class PagedSequence:
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # how many of the tokens the cache already holds
    state_slot: int = 1  # where its recurrent state lies, if it has one


def make_batch(
    work: Sequence[tuple[PagedSequence, int]], *, device: torch.device | str = "cpu", every_row: bool = False
) -> Batch:
    """The next n tokens of each sequence. Logits of each one's last row, or of every row."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for sequence, count in work:
        end = sequence.computed + count
        token_ids += sequence.token_ids[sequence.computed : end]
        positions += range(sequence.computed, end)
        starts.append(len(token_ids))
    widest = max(len(sequence.blocks) for sequence, _ in work)
    tables = [sequence.blocks + [0] * (widest - len(sequence.blocks)) for sequence, _ in work]
    rows = list(range(len(token_ids))) if every_row else [start - 1 for start in starts[1:]]

    def ints(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        token_ids=ints(token_ids),
        positions=ints(positions),
        query_starts=ints(starts),
        context_lens=ints([sequence.computed + count for sequence, count in work]),
        block_tables=ints(tables),
        logit_rows=ints(rows, torch.int64),
        num_decodes=sum(count == 1 for _, count in work),
    )


class PagedDriver:
    """One model, one cache, blocks handed out in a shuffled order and never returned."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        *,
        block_size: int,
        num_blocks: int = 64,
        seed: int = 0,
        tokens: TokenSplit = TokenSplit(),  # noqa: B008 (frozen)
        shard: Shard = Shard(),  # noqa: B008 (frozen)
    ) -> None:
        """`tokens`: those that this rank's cache keeps of a sequence, in blocks of `block_size`. `shard`: the rank."""
        self.model = model
        self.ops = ops
        self.block_size = block_size * tokens.size
        whole = kv_shape(model.config, num_blocks, block_size)
        shape = replace(whole, num_kv_heads=model.spec.num_kv_heads, tokens=tokens)
        self.kv: list[LayerKV] = ops.allocate_kv(shape)
        shape_of_state = state_shape(model.config, shard, Stage())
        self.states = soiled_states(shape_of_state, NUM_STATES, ops.device) if shape_of_state else []
        self._next_state = 0
        # Block 0 stays free: it pads the tables, and nobody may read it.
        self._free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)

    def sequence(
        self, token_ids: Sequence[int], *, shares: PagedSequence | None = None, blocks: int = 0
    ) -> PagedSequence:
        """A new sequence; its first `blocks` blocks may be another's, already computed."""
        shared = shares.blocks[:blocks] if shares else []
        self._next_state = self._next_state % NUM_STATES + 1
        return PagedSequence(list(token_ids), list(shared), len(shared) * self.block_size, self._next_state)

    def step(self, work: Sequence[tuple[PagedSequence, int]], *, every_row: bool = False) -> Tensor:
        for sequence, count in work:
            while len(sequence.blocks) * self.block_size < sequence.computed + count:
                sequence.blocks.append(self._free.pop())
        batch = with_states(make_batch(work, device=self.ops.device, every_row=every_row), work, self.states)
        with torch.inference_mode():
            logits = self.model(batch, self.kv).float()
        for sequence, count in work:
            sequence.computed += count
        return logits

    def prefill(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits of every token of one prompt, computed `chunk` tokens at a time."""
        sequence = self.sequence(token_ids)
        parts = []
        while left := len(sequence.token_ids) - sequence.computed:
            parts.append(self.step([(sequence, min(chunk or left, left))], every_row=True))
        return torch.cat(parts)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        sequence = self.sequence(prompt)
        for _ in range(num_tokens):
            logits = self.step([(sequence, len(sequence.token_ids) - sequence.computed)])
            sequence.token_ids.append(int(logits[-1].argmax()))
        return sequence.token_ids[len(prompt) :]


def kv_shape(config: ModelConfig, num_blocks: int, block_size: int) -> KVShape:
    heads = config.num_kv_heads, config.head_dim
    return KVShape(config.num_attention_layers, num_blocks, block_size, *heads, value_dim=config.cached_value_dim)


def soiled_states(shape: StateShape, num_slots: int, device: torch.device) -> list[LayerState]:
    """Slots are reused: what is in them shows when it is read."""
    states = shape.allocate(num_slots, device)
    for layer in states:
        layer.conv.fill_(48.5)
        layer.recurrent.fill_(48.5)
    return states


def with_states(batch: Batch, work: Sequence[tuple[PagedSequence, int]], states: Sequence[LayerState]) -> Batch:
    """The batch of a model that may have recurrent states."""
    if not states:
        return batch
    slots = torch.tensor(
        [sequence.state_slot for sequence, _ in work], dtype=torch.int32, device=batch.positions.device
    )
    return replace(batch, states=BatchStates(slots, states))

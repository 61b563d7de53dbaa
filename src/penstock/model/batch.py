"""One step's inputs as tensors: any mix of prefill chunks and single decode tokens, flattened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that several decodes have in common, to be attended once for all: see runner/sharing.py.

    Sequences that share a prefix are put into tiles, and the prefix of each tile is cut into pieces.
    """

    # [sequences, 3] int32: how many tokens are shared; piece * size + place, of its tile's first piece and of its place
    # in the tile; the tile's number of pieces. All 0: it shares nothing.
    sequences: Tensor
    tiles: Tensor  # [tiles, size] int32: sequences that share one prefix; the rest is -1
    pieces: Tensor  # [pieces, 3] int32: tile, begin, end; those of a tile lie together. An empty one is padding


@dataclass(frozen=True)
class SlotRows:
    """The tokens that one adapter's weights are added for."""

    slot: int  # where the adapter lies: see `model.adapters`
    rows: Tensor  # [rows] int64, in ascending order


@dataclass(frozen=True)
class ImageRows:
    """Tokens of images, in place of whose embeddings the decoder takes what the encoder made."""

    rows: Tensor  # [rows] int64
    values: Tensor  # [rows, levels * hidden]: the embedding, and what is added behind each of the first layers

    def level(self, number: int, hidden_size: int) -> Tensor:
        return self.values[:, number * hidden_size : (number + 1) * hidden_size]


@dataclass(frozen=True)
class Angles:
    """Angles by which each token of a step is rotated, where its place in the sequence alone does not give them."""

    cos: Tensor  # [tokens, 1, head_dim / 2] float32
    sin: Tensor


@dataclass(frozen=True)
class LayerState:
    """One linear layer's recurrent states of all sequences, by slot. Slot 0 is nobody's: padding goes there."""

    conv: Tensor  # [slots, kernel - 1, channels] float32: what was convolved last, the newest at the end
    recurrent: Tensor  # [slots, heads, key_dim, value_dim] float32


@dataclass(frozen=True)
class BatchStates:
    """Slots of the recurrent states of a batch's sequences. A sequence at its first token begins from zero, whatever
    is in its slot."""

    slots: Tensor  # [sequences] int32
    layers: Sequence[LayerState]  # of the linear layers of this rank's stage, in their order


@dataclass(frozen=True)
class Batch:
    """The tokens of sequence s are rows query_starts[s] to query_starts[s + 1]; they are the last ones of its
    context, so row r of them sits at position context_lens[s] - (query_starts[s + 1] - r)."""

    token_ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32, this step's tokens included
    block_tables: Tensor  # [sequences, most blocks of any] int32; rows are padded with 0
    logit_rows: Tensor  # [rows] int64: the rows whose next-token logits are wanted
    num_decodes: int  # sequences that bring exactly one token, padding included: known without asking the device
    shared: SharedPrefixes | None = None  # None: every sequence attends to its whole context itself
    adapters: tuple[SlotRows, ...] = ()  # each slot once; tokens of no slot are the base model's
    # Keys and values of single tokens are stored before any attends: several may be of one sequence, as drafts are.
    stores_first: bool = False
    slots: Tensor | None = None  # [tokens] int32, on the device, in place of `adapters`: of each token; -1: no adapter
    images: ImageRows | None = None
    mrope_positions: Tensor | None = (
        None  # [3, tokens] int32: time, row and column that a token is rotated by; None: positions
    )
    angles: Angles | None = None  # rotary angles of the positions: the decoder computes them once for all its layers
    states: BatchStates | None = None  # of models with a recurrent state

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])

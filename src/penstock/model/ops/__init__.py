"""The operations a transformer is made of, as one small interface with an implementation per device.

`reference` is plain torch and runs anywhere; `native` is C for the CPU. All of one interface, held equal by tests.
Activations are [tokens, features]. A layer makes four calls, each
as large as it can be, so that an implementation may fuse what it likes: norm and qkv, attention, output, feed-forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.core.model_config import Activation
from penstock.model.batch import Batch
from penstock.model.quantized import Weight
from penstock.model.sequence import SequenceGroup, TokenSplit

if TYPE_CHECKING:
    from penstock.model.lora_slots import Slots
    from penstock.model.ops.experts import ExpertMap
    from penstock.model.weights import Site


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    tokens: TokenSplit = TokenSplit()  # noqa: RUF009 (frozen): those of a sequence that are kept here
    value_dim: int | None = None  # values are the first so many dimensions of keys; None: they lie beside them

    @property
    def table_block_size(self) -> int:
        """Tokens of a sequence for which its block table has one entry: other ranks keep the others of them."""
        return self.block_size * self.tokens.size

    def block_bytes(self, bytes_per_value: int, bytes_per_scale: int = 0) -> int:
        """Memory of one block in all layers; a key or a value of a head may have a scale."""
        head_bytes = self.head_dim * bytes_per_value + bytes_per_scale
        caches = 2 if self.value_dim is None else 1
        return caches * self.num_layers * self.block_size * self.num_kv_heads * head_bytes


class Zeros(Protocol):
    """Allocator of a KV cache, called as `torch.zeros`."""

    def __call__(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...


@dataclass(frozen=True)
class LayerKV:
    """One layer's part of the cache. The layout is the implementation's own affair."""

    keys: Tensor
    values: Tensor | None  # None: they are a part of the keys
    block_size: int
    key_scale: float = field(default=1.0, kw_only=True)  # what is stored in 8 bits was divided by it
    value_scale: float = field(default=1.0, kw_only=True)
    tokens: TokenSplit = field(default=TokenSplit(), kw_only=True)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """All its memory, for whoever moves blocks and need not know what is in them."""
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @property
    def own_values(self) -> Tensor:
        assert self.values is not None, "its values are a part of its keys"
        return self.values


@dataclass(frozen=True)
class Rope:
    """Rotary tables: angles of every position, in the half-rotation layout of Hugging Face."""

    cos: Tensor  # [context, head_dim / 2] float32
    sin: Tensor  # [context, head_dim / 2] float32


@dataclass(frozen=True)
class AttentionSpec:
    """The constants of one layer's attention. Heads are those that this rank has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees itself and window - 1 tokens before it; None: all
    q_norm: Tensor | None = None  # [head_dim]: RMSNorm of each head before the rotation (Qwen3)
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    cap: float | None = None  # scores are kept within it: cap * tanh(score / cap)
    # [num_group_heads] float32: a score of each head's own, that takes its share of the softmax and has no value.
    sinks: Tensor | None = None
    sequence: SequenceGroup | None = None  # ranks that keep tokens of every sequence; None: this one keeps all
    # Chunked attention: contexts are cut into chunks of `window` tokens, and a token sees those of its chunk before it.
    in_chunks: bool = False
    # Values are the first so many dimensions of keys, and what is behind them of queries and keys is rotated (MLA).
    # None: values are their own, and heads are rotated from their first dimension on.
    value_dim: int | None = None

    @property
    def out_dim(self) -> int:
        """Numbers that a head yields."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_group_heads(self) -> int:
        """Heads of queries that attend here: those of all ranks that share out a sequence."""
        return self.num_heads * (self.sequence.size if self.sequence is not None else 1)


@dataclass(frozen=True)
class DeltaSpec:
    """The constants of one layer's gated delta rule. Heads are those that this rank has; each head of keys serves as
    many value heads, side by side."""

    place: int  # index of the layer among the linear ones of its stage, and so of its states
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [kernel, channels] float32: queries, keys, values; the newest token last
    decay: Tensor  # [value heads] float32: how fast each forgets
    dt_bias: Tensor  # [value heads] float32
    norm: Norm  # over each value head; its weights are stored as they are, not less one

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class Norm:
    """RMSNorm's weight, on the device in the activations' type or in float32."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Scaled:
    """A product of 8-bit numbers that is yet to be multiplied by its rows' and its columns' scales."""

    values: Tensor  # [rows, columns]
    row_scales: Tensor  # [rows] float32
    column_scales: Tensor  # [columns] float32

    def __getitem__(self, rows: Tensor) -> Scaled:
        return Scaled(self.values[rows], self.row_scales[rows], self.column_scales)


@dataclass
class Stream:
    """The residual stream of a step. The last addition may still be pending, for the next norm to add."""

    residual: Tensor  # [tokens, hidden]
    pending: Tensor | Scaled | None = None

    def total(self) -> Tensor:
        """All of it, for whoever goes on elsewhere."""
        pending = self.pending
        if isinstance(pending, Scaled):
            pending = pending.values * pending.row_scales[:, None] * pending.column_scales
        return self.residual if pending is None else (self.residual + pending).to(self.residual.dtype)

    def at(self, rows: Tensor) -> Stream:
        return Stream(self.residual[rows], None if self.pending is None else self.pending[rows])


class Linear(Protocol):
    """A weight that knows its own format. Built once by `Ops.linear`, called every step."""

    def __call__(self, x: Tensor) -> Tensor: ...


class WrappedLinear(ABC):
    """A linear around another: operations call it, and fuse nothing into it."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer as data: attention and feed-forward, each behind a norm and added to the stream."""

    attention_norm: Norm
    qkv: Linear
    spec: AttentionSpec
    rope: Rope
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Layer(Protocol):
    @property
    def parts(self) -> LayerParts | None:
        """Parts of a plain decoder layer; None: it is more than that. Operations may run plain layers their way."""

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        """Adds to the stream."""


def one_by_one(layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
    for layer, layer_kv in zip(layers, kv, strict=True):
        layer(stream, layer_kv, batch)


class ExpertWeights(NamedTuple):
    """One expert's, as they are read from files."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None  # [2 * width], gate first
    down_bias: Tensor | None = None  # [hidden]


class ExpertLinears(Protocol):
    """The experts of one layer. Built once by `Ops.experts`, called every step."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each row's sum of what its experts make of it: x [tokens, hidden], ids and weights [tokens, experts of each].

        No expert is named twice in a row; -1 is one that another rank has, and weighs nothing here. A row's result does
        not depend on the rows beside it.
        """

    def put(self, slot: int, expert: ExpertWeights) -> None:
        """Another expert, in place of the one that was there, or of none. It is packed as the others are, at the same
        addresses on a device; between steps."""


# Ids of each row's experts and their weights, [tokens, per_token] both, of a router's logits.
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Ops(Protocol):
    device: torch.device
    weight_dtype: torch.dtype  # how linear weights are stored, unless they are quantized
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        """Pack a [out, in] weight for this device. A quantized one stays so if there are kernels for its format. The
        caller drops its own copy. Kernels that round activations for its format do so less if it is `precise`."""

    def head(self, table: Weight) -> Linear:
        """The product with a [vocab, hidden] table."""

    def head_linears(self, weights: Tensor) -> Linear:
        """A weight for each head, [heads, out, in]: [tokens, heads, in] -> [tokens, heads, out]."""

    def embedding(self, table: Weight) -> Linear:
        """A lookup [tokens] int32 -> [tokens, hidden] from a [vocab, hidden] table."""

    def tied(self, table: Weight) -> tuple[Linear, Linear]:
        """(embedding, head) from one table, stored once where the implementation can."""

    def experts(
        self,
        count: int,
        weights: Iterable[ExpertWeights],
        *,
        is_part: bool = False,
        activation: Activation = "silu",
    ) -> ExpertLinears:
        """Pack each; they come one by one, and are not held on to. `count`: of slots, of which the last may be left
        empty. `is_part`: other ranks have more of the layer's experts, and tokens choose among all."""

    def route(
        self,
        logits: Tensor,
        per_token: int,
        *,
        normalized: bool,
        experts: ExpertMap | None = None,
        batch: Batch | None = None,
        choose: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Each row's best experts by a router's logits [tokens, experts], and their weights: [tokens, per_token] both.
        Weights are shares of the chosen ones among themselves if `normalized`, else of all.

        `experts`: chosen ones are counted there, and looked up where this rank has some of them: ids are its slots
        then, or -1, with no weight. A token has the copy of an expert at its id and position modulo their number: all
        ranks agree on it, whatever else is in the batch, and sequences of one length differ. `batch`: of these tokens,
        for that; rows that pad a captured step are not counted. `choose`: how experts are chosen of all, where that is
        not by the largest logits; `normalized` is its affair then."""

    def add_shared(self, found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
        """found + sigmoid(logits) * made: what a token's own experts found, and what one made that all tokens pass.
        [tokens, hidden] both; logits [tokens, 1]"""

    def normed(self, stream: Stream, norm: Norm) -> Tensor:
        """norm(stream)"""

    def add(self, stream: Stream, x: Tensor) -> None:
        """stream += x. A norm of the stream must follow before anything else is added to it."""

    def gated(self, halves: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, where gate and up are the halves of each row; or what else the activation says"""

    def capped(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), in place where it can be"""

    def norm_linear(self, stream: Stream, norm: Norm, linear: Linear) -> Tensor:
        """linear(norm(stream))"""

    def add_linear(self, stream: Stream, x: Tensor, linear: Linear) -> None:
        """stream += linear(x)"""

    def feed_forward(self, stream: Stream, norm: Norm, gate_up: Linear, down: Linear) -> None:
        """stream += down(silu(gate) * up), where gate and up are the halves of gate_up(norm(stream))"""

    def allocate_kv(self, shape: KVShape, zeros: Zeros | None = None) -> list[LayerKV]:
        """Zeroed lazily by the operating system where possible: untouched blocks cost no memory. `zeros`: where a
        device's memory comes from; None: from torch."""

    def settle_kv(self, kv: Sequence[LayerKV]) -> Thread | None:
        """The cache that steps will use: an implementation may take its memory now, in a thread beside all else."""

    def begin(self, batch: Batch) -> None:
        """A step of all layers begins: prepare what they share. A captured graph must hold it."""

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        """Rotate q and k, write k and v into the cache, attend causally over each sequence's blocks.

        qkv is [tokens, (num_heads + 2 * num_kv_heads) * head_dim], q first, then k, then v.
        Returns [tokens, num_heads * head_dim].

        There is no v where values are a part of keys (`spec.value_dim`), and rows of heads are as wide as values.
        """

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """x * sigmoid(gates), in place where it can be"""

    def delta_rule(self, projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
        """Gated DeltaNet: a short causal convolution, the gated delta rule on each sequence's state, a gated norm.

        projected is [tokens, channels + value heads * value_dim]: queries, keys, values, then the norm's gates. ba is
        [tokens, 2 * value heads]: how much of each token is written, then how fast is forgotten, before their
        nonlinearities. States of the batch's sequences are read and written. Returns [tokens, value heads * value_dim].
        """

    def run_layers(self, layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
        """All of a model, of the step that was begun: `one_by_one`, or together."""

    def lora_slots(self, sites: Sequence[Site], num_slots: int, max_rank: int) -> Slots:
        """Room for so many adapters of these linear layers, `max_rank` each where it is set aside beforehand."""

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer: the copy of copy-on-write."""

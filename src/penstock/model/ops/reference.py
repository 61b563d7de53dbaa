"""The operations in plain torch: the readable truth that kernels are compared with, and the fallback without them.

Runs on any device in float32, bfloat16 or float16; the cache may be FP8 or int8. Norms and rotations are computed in
float32, like Hugging Face's. The cache of a layer is [num_blocks, block_size, kv_heads, head_dim]; in int8, two bytes
more for the head's scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.model_config import Activation, ClampedSwiGLU
from penstock.model.batch import Batch
from penstock.model.lora_slots import PlainSlots, Slots
from penstock.model.ops import (
    AttentionSpec,
    Choose,
    DeltaSpec,
    ExpertLinears,
    ExpertWeights,
    KVShape,
    Layer,
    LayerKV,
    Linear,
    Norm,
    Rope,
    Stream,
    Zeros,
    one_by_one,
)
from penstock.model.ops.delta_rule import delta_rule
from penstock.model.ops.experts import ExpertMap, HostExperts, add_shared, route
from penstock.model.quantized import Weight, plain
from penstock.model.sequence import TokenSplit

if TYPE_CHECKING:
    from penstock.model.weights import Site

SCALE = torch.bfloat16  # of what is stored in int8

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float, float | None, Tensor | None], tuple[Tensor, Tensor | None]]


class ReferenceOps:
    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.weight_dtype = dtype
        self.activation_dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self._block_size = 1
        self._tokens = TokenSplit()  # of a sequence, those that the cache keeps
        self._layout: BatchLayout | None = None  # of the step that was begun

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        return partial(F.linear, weight=self._store(plain(weight)), bias=None if bias is None else self._store(bias))

    def head(self, table: Weight) -> Linear:
        return self.linear(table)

    def head_linears(self, weights: Tensor) -> Linear:
        return HeadProducts(self._store(weights).transpose(1, 2).contiguous())

    def embedding(self, table: Weight) -> Linear:
        return partial(F.embedding, weight=self._store(plain(table)))

    def tied(self, table: Weight) -> tuple[Linear, Linear]:
        stored = self._store(plain(table))
        return partial(F.embedding, weight=stored), partial(F.linear, weight=stored)

    def experts(
        self,
        count: int,
        weights: Iterable[ExpertWeights],
        *,
        is_part: bool = False,
        activation: Activation = "silu",
    ) -> ExpertLinears:
        return HostExperts.of(self, weights, activation)

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
        return route(logits, per_token, normalized=normalized, experts=experts, batch=batch, choose=choose)

    def add_shared(self, found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
        return add_shared(found, made, logits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

    def normed(self, stream: Stream, norm: Norm) -> Tensor:
        return self.rms_norm(stream.residual, norm.weight, norm.eps)

    def add(self, stream: Stream, x: Tensor) -> None:
        stream.residual += x

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gated(gate_up, "silu")

    def gated(self, halves: Tensor, activation: Activation) -> Tensor:
        gate, up = halves.chunk(2, dim=-1)
        if isinstance(activation, ClampedSwiGLU):
            return clamped_swiglu(gate, up, activation)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def capped(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def norm_linear(self, stream: Stream, norm: Norm, linear: Linear) -> Tensor:
        return linear(self.rms_norm(stream.residual, norm.weight, norm.eps))

    def add_linear(self, stream: Stream, x: Tensor, linear: Linear) -> None:
        stream.residual += linear(x)

    def feed_forward(self, stream: Stream, norm: Norm, gate_up: Linear, down: Linear) -> None:
        self.add_linear(stream, self.silu_mul(self.norm_linear(stream, norm, gate_up)), down)

    def allocate_kv(self, shape: KVShape, zeros: Zeros | None = None) -> list[LayerKV]:
        self._block_size, self._tokens = shape.block_size, shape.tokens
        head_size = shape.head_dim + (SCALE.itemsize if self.kv_dtype is torch.int8 else 0)

        def made() -> Tensor:
            # Not `empty`: a masked slot still meets a weight of zero, and zero times a stray NaN is NaN.
            size = (shape.num_blocks, shape.block_size, shape.num_kv_heads, head_size)
            return (zeros or torch.zeros)(size, dtype=self.kv_dtype, device=self.device)

        def layer() -> LayerKV:
            return LayerKV(made(), None if shares else made(), shape.block_size, tokens=shape.tokens)

        shares = shape.value_dim is not None
        return [layer() for _ in range(shape.num_layers)]

    def settle_kv(self, kv: Sequence[LayerKV]) -> None:
        pass

    def begin(self, batch: Batch) -> None:
        self._layout = BatchLayout(batch, self._block_size, self._tokens)

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        def attended(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
            return self._attended(qkv, spec, rope, kv, batch, attend_part)

        if spec.sequence is not None:
            return spec.sequence.attention(qkv, spec, attended)
        return self._attended(qkv, spec, rope, kv, batch, attend)[0]

    def _attended(
        self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and the log-sum-exp of scores where `attend` finds it."""
        layout = self._layout
        assert layout is not None, "a step must begin first"
        assert layout.batch is batch, "another step was begun"
        q, k, v = self._heads(qkv, spec, rope, batch)
        kv.keys[layout.blocks, layout.offsets] = as_stored(k[layout.rows], kv.key_scale, self.kv_dtype)
        if kv.values is not None and v is not None:
            kv.values[layout.blocks, layout.offsets] = as_stored(v[layout.rows], kv.value_scale, self.kv_dtype)
        out = q.new_empty(*q.shape[:2], spec.out_dim)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for group in layout.groups:
            keys = as_read(kv.keys[group.blocks], q.dtype)
            values = keys[..., : spec.out_dim] if kv.values is None else as_read(kv.values[group.blocks], q.dtype)
            found, found_lse = attend(
                q[group.rows].transpose(1, 2),  # [sequences, heads, queries, dim]
                keys.flatten(1, 2).transpose(1, 2),  # [sequences, kv_heads, context, dim]
                values.flatten(1, 2).transpose(1, 2),
                group.mask(spec.window, in_chunks=spec.in_chunks),
                spec.scale * kv.key_scale,
                spec.cap,
                spec.sinks if kv.tokens.place == 0 else None,  # once, of ranks that share out tokens
            )
            out[group.rows] = found.transpose(1, 2) * kv.value_scale
            if found_lse is not None:
                lse[group.rows] = found_lse.transpose(1, 2)
        return out.flatten(1), lse

    def _heads(
        self, qkv: Tensor, spec: AttentionSpec, rope: Rope, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys, normed and rotated, and values that are their own: [tokens, heads, dim]."""
        heads = qkv.view(batch.num_tokens, -1, spec.head_dim)
        if spec.value_dim is not None:
            turned = rotate_end(heads, rope, batch.positions, spec.value_dim)
            return turned[:, : spec.num_heads], turned[:, spec.num_heads :], None
        q, k, v = heads.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.q_norm is not None:
            q = self.rms_norm(q, spec.q_norm, spec.norm_eps)
        if spec.k_norm is not None:
            k = self.rms_norm(k, spec.k_norm, spec.norm_eps)
        return rotate(q, rope, batch.positions), rotate(k, rope, batch.positions), v

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        return x * gates.sigmoid()

    def delta_rule(self, projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
        return delta_rule(projected, ba, spec, batch)

    def run_layers(self, layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
        one_by_one(layers, stream, kv, batch)

    def lora_slots(self, sites: Sequence[Site], num_slots: int, max_rank: int) -> Slots:
        return PlainSlots(self, num_slots)

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        for layer in kv:
            for cache in layer.caches:
                cache[destinations] = cache[sources]

    def _store(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.weight_dtype)


def rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Turn each head of x [tokens, heads, dim]; dimension i is paired with i + dim / 2."""
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)  # [tokens, 1, dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_end(x: Tensor, rope: Rope, positions: Tensor, first: int) -> Tensor:
    """Turn what is behind the first so many dimensions of each head of x [tokens, heads, dim]."""
    return torch.cat((x[..., :first], rotate(x[..., first:], rope, positions)), dim=-1)


@dataclass(frozen=True)
class HeadProducts:
    """See `Ops.head_linears`."""

    weights: Tensor  # [heads, in, out]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weights).transpose(0, 1)


def clamped_swiglu(gate: Tensor, up: Tensor, activation: ClampedSwiGLU) -> Tensor:
    """See `ClampedSwiGLU`."""
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(gate * activation.alpha) * (up + 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True), None
    scores, v = _scores(q, k, v, mask, scale, cap, sinks)
    return _weights(scores, k).to(q.dtype) @ v, None


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attention and the log-sum-exp of scores [sequences, heads, queries]. A query may see nothing: zeros, and -inf."""
    scores, v = _scores(q, k, v, mask, scale, cap, sinks)
    return _weights(scores, k).nan_to_num(0.0).to(q.dtype) @ v, scores.logsumexp(dim=-1)


def _weights(scores: Tensor, k: Tensor) -> Tensor:
    """The keys' shares of the softmax."""
    return scores.softmax(dim=-1)[..., : k.shape[2]]


def _scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores in float32, -inf where they are masked, behind them the head's sink; values of each head of queries."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return scores, v


def as_stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values as the cache keeps them: in 8 bits divided by the scale, and no larger than they can be.

    Each head of each token has a scale of its own in int8, behind its integers, by which its largest is 127.
    """
    if dtype.itemsize > 1:
        return x
    if dtype is torch.int8:
        scales = (x.float().abs().amax(-1, keepdim=True) / 127).to(SCALE)
        rounded = (x.float() / scales.float()).nan_to_num(0.0).round().clamp(-127, 127)
        return torch.cat((rounded.to(torch.int8), scales.view(torch.int8)), dim=-1)
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


def as_read(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as read from the cache, but for the scale of a whole layer."""
    if stored.dtype is not torch.int8:
        return stored.to(dtype)
    integers, scales = stored.split_with_sizes([stored.shape[-1] - SCALE.itemsize, SCALE.itemsize], dim=-1)
    return (integers.float() * scales.view(SCALE).float()).to(dtype)


class BatchLayout:
    """Places of one batch's tokens in the cache, and its sequences that can be attended together."""

    def __init__(self, batch: Batch, block_size: int, tokens: TokenSplit) -> None:
        self.batch = batch
        self.rows = torch.nonzero(tokens.keeps(batch.positions, block_size)).squeeze(1)  # tokens that are stored here
        query_lens = batch.query_starts.diff()
        sequences = torch.repeat_interleave(query_lens, output_size=batch.num_tokens)  # of each token
        positions = batch.positions[self.rows]
        self.blocks = batch.block_tables[sequences[self.rows], positions // (block_size * tokens.size)]  # [rows]
        self.offsets = positions % block_size  # [rows]

        # Sequences that bring equally many tokens are one padded call: all decodes together, most chunks alone.
        members: dict[int, list[int]] = {}
        for sequence, query_len in enumerate(query_lens.tolist()):
            members.setdefault(query_len, []).append(sequence)
        self.groups = [Group.of(batch, block_size, tokens, query_len, found) for query_len, found in members.items()]


@dataclass(frozen=True)
class Group:
    """Sequences of one batch with equally many tokens in it, padded to the longest context among them."""

    rows: Tensor  # [sequences, queries]: rows of the batch
    positions: Tensor  # [sequences, queries]
    block_size: int
    tokens: TokenSplit
    blocks: Tensor  # [sequences, blocks]
    context_len: int  # slots in those blocks
    masks: dict[tuple[int | None, bool], Tensor]  # by window; filled as layers ask

    @classmethod
    def of(cls, batch: Batch, block_size: int, tokens: TokenSplit, query_len: int, sequences: list[int]) -> Group:
        device = batch.token_ids.device
        members = torch.tensor(sequences, device=device)
        rows = batch.query_starts[members].unsqueeze(1) + torch.arange(query_len, device=device)
        num_kept = int(tokens.kept(batch.context_lens[members], block_size).max())
        num_blocks = max(1, -(-num_kept // block_size))
        blocks = batch.block_tables[members, :num_blocks]
        positions = batch.positions[rows]
        return cls(rows, positions, block_size, tokens, blocks, num_blocks * block_size, masks={})

    def mask(self, window: int | None, *, in_chunks: bool = False) -> Tensor:
        """Mask of what each query sees, [sequences, 1, queries, context]. The padding of a context is its future."""
        if (window, in_chunks) not in self.masks:
            ends, keys = self.positions.unsqueeze(2) + 1, torch.arange(self.context_len, device=self.rows.device)
            seen = keys < self.tokens.kept(ends, self.block_size)
            if window is not None:
                oldest = (ends - 1) // window * window if in_chunks else (ends - window).clamp(min=0)
                seen &= keys >= self.tokens.kept(oldest, self.block_size)
            self.masks[window, in_chunks] = seen.unsqueeze(1)
        return self.masks[window, in_chunks]

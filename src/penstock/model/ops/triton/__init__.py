"""The operations for NVIDIA GPUs: matrix products by cuBLAS, the rest by Triton kernels.

The interface is that of `reference`, held equal to it by tests. Nothing here reads a device tensor on the host, so
steps can be launched ahead and decode steps captured in CUDA graphs. Kernels lie by operation, and the first lines of
each file say for which shapes it is and what share of the limit it reaches. Compiled kernels are kept on disk by
Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.model_config import Activation
from penstock.model.batch import Batch
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
    WrappedLinear,
    Zeros,
    one_by_one,
)
from penstock.model.ops.experts import ExpertMap
from penstock.model.ops.reference import HeadProducts
from penstock.model.ops.triton.attention.decode import attend_decodes
from penstock.model.ops.triton.attention.decode_plan import DecodePlan, plan_decodes
from penstock.model.ops.triton.attention.kv_store import store_chunks, store_singles
from penstock.model.ops.triton.attention.latent import attend_latents
from penstock.model.ops.triton.attention.merge import merge_parts
from penstock.model.ops.triton.attention.prefill import attend_chunks
from penstock.model.ops.triton.attention.shared_prefix import attend_shared
from penstock.model.ops.triton.common import rowwise
from penstock.model.ops.triton.common.device import capability, num_processors
from penstock.model.ops.triton.linear import gemv
from penstock.model.ops.triton.linear.formats import MULTIPLE, ByteLinear, FloatLinear, Fp8Linear, GpuLinear, Int8Linear
from penstock.model.ops.triton.linear.int4_pack import narrowed
from penstock.model.ops.triton.linear.w4a16_linear import W4A16Linear
from penstock.model.ops.triton.linear_attention.delta import delta_rule
from penstock.model.ops.triton.lora.slots import TritonSlots
from penstock.model.ops.triton.moe import experts, routing
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.model.sequence import TokenSplit

if TYPE_CHECKING:
    from penstock.model.lora_slots import Slots
    from penstock.model.weights import Site

MIN_BLOCK_SIZE = 16  # what a matrix product takes; 64 and more is fast


@dataclass(frozen=True)
class Step:
    batch: Batch
    plan: DecodePlan | None


@dataclass(frozen=True)
class TritonKV(LayerKV):
    """Keys and values [num_blocks, kv_heads, block_size, head_dim]: views of all the layers' cache."""

    pool: Tensor  # [layers, 2, num_blocks, kv_heads, block_size, head_dim]; 1 for 2 where values are a part of keys


class TritonOps:
    def __init__(self, device: torch.device | str, dtype: torch.dtype, *, kv_dtype: torch.dtype | None = None) -> None:
        self.device = torch.device(device)
        self.weight_dtype = dtype
        self.activation_dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self._num_processors = num_processors(self.device)
        # FP8 products give bfloat16, and came with Ada Lovelace.
        self._has_fp8 = dtype is torch.bfloat16 and capability(self.device) >= (8, 9)
        # Ampere and later multiply int8 as fast as Triton's kernels for a few rows need it.
        self._has_int8 = dtype is not torch.float32 and capability(self.device) >= (8, 0)
        self._num_kv_heads = 1
        self._block_size, self._tokens = MIN_BLOCK_SIZE, TokenSplit()
        self._step: Step | None = None

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        return self._linear(weight, None if bias is None else self._store(bias))

    def head(self, table: Weight) -> Linear:
        return self._table(table)

    def head_linears(self, weights: Tensor) -> Linear:
        return HeadProducts(self._store(weights).transpose(1, 2).contiguous())

    def embedding(self, table: Weight) -> Linear:
        return self._lookup(self._table(table))

    def tied(self, table: Weight) -> tuple[Linear, Linear]:
        stored = self._table(table)
        return self._lookup(stored), stored

    def experts(
        self,
        count: int,
        weights: Iterable[ExpertWeights],
        *,
        is_part: bool = False,
        activation: Activation = "silu",
    ) -> ExpertLinears:
        integers = () if self.weight_dtype is torch.float32 else (GroupedWeight, Int8Weight, Mxfp4Weight)
        keeps = (*integers, Fp8Weight) if self._has_fp8 else integers
        stacks = experts.stacked(weights, count, self.weight_dtype, self.device, keeps, activation)
        return replace(stacks, is_part=is_part)

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
        if choose is not None:
            return routing.chosen(choose(logits, per_token), experts, batch)
        return routing.topk(logits, per_token, normalized=normalized, experts=experts, batch=batch)

    def add_shared(self, found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
        return routing.add_shared(found, made, logits)

    def normed(self, stream: Stream, norm: Norm) -> Tensor:
        return rowwise.rms_norm(stream, norm)

    def add(self, stream: Stream, x: Tensor) -> None:
        assert stream.pending is None
        stream.pending = x  # every sum is followed by a norm, which adds it on its way

    def gated(self, halves: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return rowwise.silu_mul(halves)
        gate, up = halves.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def capped(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x.float() / cap).mul_(cap)

    def norm_linear(self, stream: Stream, norm: Norm, linear: Linear) -> Tensor:
        if isinstance(linear, WrappedLinear):
            return linear(rowwise.rms_norm(stream, norm))
        return self._norm_product(stream, norm, _on_gpu(linear), gemv.Epilogue.NONE)

    def add_linear(self, stream: Stream, x: Tensor, linear: Linear) -> None:
        if isinstance(linear, WrappedLinear):
            self.add(stream, linear(x))
            return
        linear = _on_gpu(linear)
        if linear.can_gemv(x.shape[0]):
            assert stream.pending is None
            linear.gemv(x, epilogue=gemv.Epilogue.ADD, into=stream.residual)
        elif isinstance(linear, ByteLinear) and not linear.has_bias:
            stream.pending = linear.product(rowwise.quantize(x, linear.quantization), x.dtype)
        else:
            stream.pending = linear(x)  # every sum is followed by a norm, which adds it on its way

    def feed_forward(self, stream: Stream, norm: Norm, gate_up: Linear, down: Linear) -> None:
        if isinstance(gate_up, WrappedLinear) or isinstance(down, WrappedLinear):
            self.add_linear(stream, rowwise.silu_mul(self.norm_linear(stream, norm, gate_up)), down)
            return
        gate_up, down = _on_gpu(gate_up), _on_gpu(down)
        if gate_up.can_gemv(stream.residual.shape[0], gemv.Epilogue.SWIGLU):
            self.add_linear(stream, self._norm_product(stream, norm, gate_up, gemv.Epilogue.SWIGLU), down)
            return
        halves = self.norm_linear(stream, norm, gate_up)
        if isinstance(down, ByteLinear) and not down.can_gemv(halves.shape[0]):
            stream.pending = down.product(rowwise.silu_mul(halves, down.quantization), halves.dtype)
        else:
            self.add_linear(stream, rowwise.silu_mul(halves), down)

    def allocate_kv(self, shape: KVShape, zeros: Zeros | None = None) -> list[LayerKV]:
        if shape.block_size % MIN_BLOCK_SIZE:
            message = f"block_size is {shape.block_size}, but a GPU needs a multiple of {MIN_BLOCK_SIZE}"
            raise ConfigError(message, param="block_size")
        self._num_kv_heads = shape.num_kv_heads
        caches = 2 if shape.value_dim is None else 1
        size = (shape.num_layers, caches, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        pool = (zeros or torch.zeros)(size, dtype=self.kv_dtype, device=self.device)
        self._block_size, self._tokens = shape.block_size, shape.tokens

        def layer(caches: Tensor) -> TritonKV:
            values = None if shape.value_dim is not None else caches[1]
            return TritonKV(caches[0], values, shape.block_size, pool, tokens=shape.tokens)

        return [layer(caches) for caches in pool]

    def settle_kv(self, kv: Sequence[LayerKV]) -> None:
        pass

    def begin(self, batch: Batch) -> None:
        plan = None
        if batch.num_decodes:
            plan = plan_decodes(batch, self._num_kv_heads, self._num_processors, self._block_size, self._tokens)
        self._step = Step(batch, plan)

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        if spec.value_dim is not None:
            step, out = self._step_of(batch), qkv.new_empty(batch.num_tokens, spec.num_heads * spec.value_dim)
            attend_latents(qkv, spec, rope, kv, batch, step.plan, out)
            return out
        if spec.sequence is None:
            return self.attended(qkv, spec, rope, kv, batch)
        lse = qkv.new_empty(batch.num_tokens, spec.num_group_heads, dtype=torch.float32)

        def attend(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
            return self.attended(qkv, spec, rope, kv, batch, lse), lse

        return spec.sequence.attention(qkv, spec, attend, merge_parts)

    def attended(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        rope: Rope,
        kv: LayerKV,
        batch: Batch,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Over the tokens that the cache keeps. `lse` [tokens, heads] float32: where log-sum-exps of scores go, if
        other ranks keep more of them."""
        step = self._step_of(batch)
        out = qkv.new_empty(batch.num_tokens, spec.num_heads * spec.head_dim)
        if lse is not None:
            out.zero_()  # rows of padding, which nobody writes, are merged too
            lse.fill_(-torch.inf)
        if batch.num_decodes < batch.num_sequences:
            store_chunks(qkv, spec, rope, kv, batch)
            attend_chunks(qkv, spec, rope, kv, batch, out, lse=lse)
        if step.plan is not None:
            if batch.stores_first:
                store_singles(qkv, spec, rope, kv, batch)
            shared = attend_shared(qkv, spec, rope, kv, batch, out) if batch.shared else None
            attend_decodes(qkv, spec, rope, kv, batch, step.plan, out, shared=shared, lse=lse)
        return out

    def _step_of(self, batch: Batch) -> Step:
        step = self._step
        assert step is not None, "a step must begin first"
        assert step.batch is batch, "another step was begun"
        return step

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        return (x * gates.float().sigmoid()).to(x.dtype)

    def delta_rule(self, projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
        return delta_rule(projected, ba, spec, batch)

    def run_layers(self, layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
        one_by_one(layers, stream, kv, batch)

    def lora_slots(self, sites: Sequence[Site], num_slots: int, max_rank: int) -> Slots:
        return TritonSlots(self, sites, num_slots, max_rank)

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        ids = torch.tensor(pairs, dtype=torch.int64)
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        first = kv[0]
        assert isinstance(first, TritonKV)
        sources, destinations = ids.unbind(1)
        pool = first.pool.view(torch.int16)  # of any type: not every torch indexes FP8
        pool[:, :, destinations] = pool[:, :, sources]

    def _norm_product(self, stream: Stream, norm: Norm, linear: GpuLinear, epilogue: gemv.Epilogue) -> Tensor:
        num_rows = stream.residual.shape[0]
        if linear.can_gemv(num_rows, epilogue):
            if stream.pending is None and linear.can_fuse_norm(num_rows):
                return linear.gemv(stream.residual, norm=norm, epilogue=epilogue)
            return linear.gemv(rowwise.rms_norm(stream, norm), epilogue=epilogue)
        assert epilogue is gemv.Epilogue.NONE
        if isinstance(linear, ByteLinear):
            rows = rowwise.rms_norm(stream, norm, linear.quantization)
            return linear.scaled_product(rows, stream.residual.dtype)
        return linear(rowwise.rms_norm(stream, norm))

    def _linear(self, weight: Weight, bias: Tensor | None) -> GpuLinear:
        """The weight stays in its own format, if there is a kernel for it; others are widened, and take more memory."""
        is_half = self.weight_dtype is not torch.float32
        if is_half and isinstance(weight, GroupedWeight) and W4A16Linear.supports(weight):
            return W4A16Linear.of(narrowed(weight), bias)
        if isinstance(weight, Fp8Weight) and self._has_fp8 and _multiplies(weight.shape):
            quantization = rowwise.Quantization(weight.input_scale)
            return Fp8Linear(self._bytes(weight, bias), quantization, torch.ones((), device=self.device))
        if isinstance(weight, Int8Weight) and self._has_int8 and _multiplies(weight.shape):
            return Int8Linear(self._bytes(weight, bias), rowwise.Quantization(None, torch.int8))
        return FloatLinear(gemv.Weight(self._store(plain(weight)), bias=bias))

    def _table(self, table: Weight) -> GpuLinear:
        """A table of an embedding or a head is not kept in 8 bits: to quantize its rows would cost precision."""
        return self._linear(table if isinstance(table, GroupedWeight) else plain(table), None)

    def _bytes(self, weight: Fp8Weight | Int8Weight, bias: Tensor | None) -> gemv.Weight:
        return gemv.Weight(weight.values.to(self.device), weight.scales.to(self.device, torch.float32), bias)

    def _lookup(self, linear: GpuLinear) -> Linear:
        if isinstance(linear, W4A16Linear):
            return partial(linear.rows, dtype=self.activation_dtype)
        assert isinstance(linear, FloatLinear)
        return partial(F.embedding, weight=linear.weight.values)

    def _store(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.weight_dtype)


def _multiplies(shape: torch.Size) -> bool:
    return all(size % MULTIPLE == 0 for size in shape)


def _on_gpu(linear: Linear) -> GpuLinear:
    assert isinstance(linear, FloatLinear | ByteLinear | W4A16Linear)
    return linear

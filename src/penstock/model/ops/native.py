"""The operations in C, for the CPU: the same interface as `reference`, held equal to it by tests.

This module packs weights and passes pointers; what is computed, and on how many threads, is in `kernels/`.
Activations are float32. A row's result is bitwise the same whatever else is in the batch, however a prompt was
chunked, and for any number of threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.cores import usable_cores
from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import Activation, ClampedSwiGLU
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
    Scaled,
    Stream,
    Zeros,
    one_by_one,
)
from penstock.model.ops import library as c
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.experts import ExpertMap, add_shared, route
from penstock.model.ops.layer_call import LayerCall, NativeKV
from penstock.model.ops.library import ARITHMETICS, CACHED_INT8, LOW_BIT, MAX_HEAD_DIM, load_library, pointer
from penstock.model.ops.memory import Arena, pages, settle
from penstock.model.ops.native_experts import NativeExperts
from penstock.model.ops.panels import NativeHeads, NativeLinear, NativeLookup, PackedWeight, packed_low_bit
from penstock.model.ops.program import Program
from penstock.model.ops.reference import rotate_end
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.quantized import Weight, plain
from penstock.model.sequence import SequenceGroup

if TYPE_CHECKING:
    from penstock.model.lora_slots import Slots
    from penstock.model.weights import Site


class NativeOps:
    """Raises KernelsUnavailable where there is no compiler, or no such arithmetic on this processor.

    `keeps` names the bits of quantized weights that stay as they are: their products are of integers, and activations
    are rounded to 8 or 15 bits. All other weights are widened. The cache is like the weights, or `kv_dtype` int8.
    """

    def __init__(
        self,
        arithmetic: str = "float32",
        threads: int | None = None,
        keeps: frozenset[int] = frozenset(),
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.weight_dtype = ARITHMETICS[arithmetic]
        self.activation_dtype = torch.float32
        self.kv_dtype = kv_dtype or self.weight_dtype
        assert self.kv_dtype in (self.weight_dtype, torch.int8), "no such cache"
        self.arithmetic = list(ARITHMETICS).index(arithmetic)
        self.library = load_library()
        if not self.library.arithmetic_at(self.arithmetic):
            raise KernelsUnavailable(f"this processor has no instruction for {arithmetic}")
        for bits in keeps:
            if not self.library.arithmetic_at(LOW_BIT[bits]):
                raise KernelsUnavailable(f"this processor has no instruction for weights of {bits} bits")
        self.keeps = keeps
        self.kv_arithmetic = self.arithmetic
        if self.kv_dtype is torch.int8:
            self.kv_arithmetic = next(each for each in CACHED_INT8 if self.library.arithmetic_at(each))
        self.pool = self.library.pool_new(threads or usable_cores())
        weakref.finalize(self, self.library.pool_free, self.pool)
        self.arena = Arena()
        self.packing = threading.Lock()  # layers are loaded by several threads, and the pool serves one caller
        self._batch: Batch | None = None
        self._batch_struct = c.Batch()
        self._programs: dict[int, Program] = {}  # by whose layers they are: with and without adapters

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        return NativeLinear(self._packed(weight, bias, precise=precise))

    def head(self, table: Weight) -> Linear:
        return self.linear(table)

    def head_linears(self, weights: Tensor) -> Linear:
        return NativeHeads([NativeLinear(self._packed(weight, None)) for weight in weights])

    def embedding(self, table: Weight) -> Linear:
        if not isinstance(table, Tensor) and (packed := packed_low_bit(self, table, None, self.keeps)):
            return NativeLookup(packed)
        stored = plain(table).to(self.weight_dtype)
        return lambda ids: F.embedding(ids, stored).float()

    def tied(self, table: Weight) -> tuple[Linear, Linear]:
        packed = self._packed(table, None)
        return NativeLookup(packed), NativeLinear(packed)

    def _packed(self, weight: Weight, bias: Tensor | None, *, precise: bool = True) -> PackedWeight:
        if kept := packed_low_bit(self, weight, bias, self.keeps, precise=precise):
            return kept
        wide = plain(weight)
        return PackedWeight(self, self.arithmetic, wide.shape, bias).fill(wide)

    def experts(
        self,
        count: int,
        weights: Iterable[ExpertWeights],
        *,
        is_part: bool = False,
        activation: Activation = "silu",
    ) -> ExpertLinears:
        def pack(expert: ExpertWeights) -> tuple[PackedWeight, PackedWeight]:
            gate_up = self._packed(expert.gate_up, expert.gate_up_bias, precise=False)
            return gate_up, self._packed(expert.down, expert.down_bias)

        return NativeExperts(count, [pack(expert) for expert in weights], pack, activation)

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

    def normed(self, stream: Stream, norm: Norm) -> Tensor:
        return self.rms_norm(stream, norm)

    def add(self, stream: Stream, x: Tensor) -> None:
        stream.pending = x  # every sum is followed by a norm, which adds it on its way

    def rms_norm(self, stream: Stream, norm: Norm) -> Tensor:
        """The norm of the stream; what was pending is added to it."""
        residual, pending = stream.residual, stream.pending
        assert not isinstance(pending, Scaled)
        (m, n), out = residual.shape, torch.empty_like(residual)
        x, sums = (residual, None) if pending is None else (pending, residual)
        self.library.rms_norm(
            self.pool, x.data_ptr(), pointer(sums), norm.weight.data_ptr(), out.data_ptr(), m, n, norm.eps
        )
        stream.pending = None
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gated(gate_up, "silu")

    def gated(self, halves: Tensor, activation: Activation) -> Tensor:
        m, n = halves.shape
        out = halves.new_empty(m, n // 2)
        if isinstance(activation, ClampedSwiGLU):
            ends = halves.data_ptr(), out.data_ptr()
            self.library.clamped_swiglu(self.pool, *ends, m, n // 2, activation.alpha, activation.limit)
            return out
        run = self.library.silu_mul if activation == "silu" else self.library.gelu_mul
        run(self.pool, halves.data_ptr(), out.data_ptr(), m, n // 2)
        return out

    def capped(self, x: Tensor, cap: float) -> Tensor:
        self.library.cap(self.pool, x.data_ptr(), *x.shape, cap)
        return x

    def norm_linear(self, stream: Stream, norm: Norm, linear: Linear) -> Tensor:
        return linear(self.rms_norm(stream, norm))

    def add_linear(self, stream: Stream, x: Tensor, linear: Linear) -> None:
        self.add(stream, linear(x))

    def feed_forward(self, stream: Stream, norm: Norm, gate_up: Linear, down: Linear) -> None:
        self.add_linear(stream, self.silu_mul(self.norm_linear(stream, norm, gate_up)), down)

    def allocate_kv(self, shape: KVShape, zeros: Zeros | None = None) -> list[LayerKV]:
        if shape.head_dim % 8 or shape.head_dim > MAX_HEAD_DIM:
            raise ModelUnsupported(f"head size {shape.head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}")
        if shape.value_dim is not None and self.kv_dtype is torch.int8:
            raise ModelUnsupported("a cache in int8 has keys and values of their own, and this model's are one")
        sizes = (self.kv_arithmetic, shape.block_size, shape.num_kv_heads, shape.head_dim)
        key_bytes, value_bytes = self.library.key_block_bytes(*sizes), self.library.value_block_bytes(*sizes)

        def made(block_bytes: int) -> Tensor:
            size = (shape.num_blocks, block_bytes)
            if zeros is not None:
                return zeros(size, dtype=torch.uint8, device=self.device)
            return pages(shape.num_blocks * block_bytes).view(size)

        def layer() -> NativeKV:
            keys = made(key_bytes)
            values = None if shape.value_dim is not None else made(value_bytes)
            call = LayerCall(self.kv_arithmetic, keys, values, shape)
            return NativeKV(keys, values, shape.block_size, call, tokens=shape.tokens)

        return [layer() for _ in range(shape.num_layers)]

    def settle_kv(self, kv: Sequence[LayerKV]) -> threading.Thread:
        """Take the cache's memory, unless it is much (see `memory.settle`): beside whatever else is done, since where
        others' pages must be moved it takes seconds."""

        def take() -> None:
            settled = settle([part for layer in kv for part in layer.caches])
            for layer in kv:
                assert isinstance(layer, NativeKV)
                layer.call.struct.settled = settled

        thread = threading.Thread(target=take, name="settle-kv", daemon=True)
        thread.start()
        return thread

    def begin(self, batch: Batch) -> None:
        """Point C at the step's batch."""
        tensors = (batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
        assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in tensors)
        self._batch = batch  # kept: the struct points into its tensors
        self._batch_struct = c.Batch(
            *(tensor.data_ptr() for tensor in tensors),
            batch.block_tables.shape[1],
            batch.num_sequences,
            batch.num_tokens,
        )

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        assert isinstance(kv, NativeKV)
        call = kv.call
        if call.spec is not spec or call.rope is not rope:
            call.describe(spec, rope)
        assert self._batch is batch, "another step was begun"
        if spec.value_dim is not None:
            qkv = self._end_rotated(qkv, spec, rope, batch)
        out = qkv.new_empty(qkv.shape[0], spec.num_heads * spec.out_dim)
        if spec.sequence is None:
            self.library.attention_run(self.pool, None, call.struct, self._batch_struct, qkv.data_ptr(), out.data_ptr())
        elif isinstance(spec.sequence.ranks, SharedMemoryRanks):
            ranks, ends = spec.sequence.ranks, (qkv.data_ptr(), out.data_ptr())
            ranks.check(self.library.attention_run(self.pool, ranks.struct, call.struct, self._batch_struct, *ends))
        else:
            self._attend_among(qkv, spec, spec.sequence, call, out)
        return out

    def _end_rotated(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, batch: Batch) -> Tensor:
        """Queries and keys whose ends are rotated: C rotates whole heads, and these not at all."""
        assert spec.value_dim is not None
        heads = qkv.view(batch.num_tokens, -1, spec.head_dim)
        return rotate_end(heads, rope, batch.positions, spec.value_dim).flatten(1)

    def _attend_among(
        self, qkv: Tensor, spec: AttentionSpec, group: SequenceGroup, call: LayerCall, out: Tensor
    ) -> None:
        """Attention over tokens that are shared out among ranks which C cannot reach."""
        tokens, own = out.shape
        queries = group.ranks.gather(qkv[:, :own], group.size)
        parts = qkv.new_empty(group.size, tokens, own + spec.num_heads)
        pointers = queries.data_ptr(), qkv.data_ptr(), parts.data_ptr()
        self.library.attention_part(self.pool, call.struct, self._batch_struct, *pointers)
        found = group.ranks.exchange(parts)
        self.library.attention_merge(self.pool, call.struct, found.data_ptr(), out.data_ptr(), tokens)

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        assert gates.stride(1) == 1
        (m, n), out = x.shape, torch.empty_like(x)
        ends = x.data_ptr(), gates.data_ptr(), out.data_ptr()
        self.library.sigmoid_mul(self.pool, *ends, m, n, gates.stride(0))
        return out

    def delta_rule(self, projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
        states = batch.states
        assert states is not None, "a model with a recurrent state is run with its slots"
        state, out = (
            states.layers[spec.place],
            projected.new_empty(len(projected), spec.num_value_heads * spec.value_dim),
        )
        tensors = (
            *(projected, ba, spec.conv, spec.decay, spec.dt_bias, spec.norm.weight, state.conv, state.recurrent),
            *(batch.query_starts, batch.positions, states.slots, out),
        )
        assert all(each.is_contiguous() for each in tensors)
        served = spec.num_value_heads // spec.num_key_heads
        sizes = batch.num_sequences, spec.num_key_heads, served, spec.key_dim, spec.value_dim, len(spec.conv)
        pointers = (each.data_ptr() for each in tensors)
        self.library.delta_run(self.pool, c.Delta(*pointers, None, *sizes, spec.norm.eps))
        return out

    def run_layers(self, layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
        program = self._programs.get(id(layers))
        if program is None or not program.is_of(layers, kv):
            program = self._programs[id(layers)] = Program(layers, kv)
        if program.structs is None:
            one_by_one(layers, stream, kv, batch)
            return
        assert self._batch is batch, "another step was begun"
        assert stream.pending is None, "the layers begin the stream"
        stream.pending = pending = torch.empty_like(stream.residual)
        streams = stream.residual.data_ptr(), pending.data_ptr()
        ranks = program.ranks
        shared = None if ranks is None else ranks.struct
        lost = self.library.layers_run(self.pool, shared, program.structs, len(layers), self._batch_struct, *streams)
        if ranks is not None:
            ranks.check(lost)

    def lora_slots(self, sites: Sequence[Site], num_slots: int, max_rank: int) -> Slots:
        from penstock.model.ops.native_adapters import NativeSlots  # late: it packs adapters with operations of its own

        return NativeSlots(self, num_slots, len(sites))

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        for layer in kv:
            for cache in layer.caches:
                cache[destinations] = cache[sources]

"""The operations for NVIDIA GPUs: matrix products by cuBLAS, the rest by Triton kernels.

The same interface as `reference`, held equal to it by tests. Nothing here reads a device tensor on the host, so
steps can be launched ahead and decode steps captured in CUDA graphs. Compiled kernels are
kept on disk by Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, Fp8Weight, KVShape, LayerKV, Linear, Rope, plain
from penstock.model.ops.triton import rowwise
from penstock.model.ops.triton.decode import attend_decodes
from penstock.model.ops.triton.decode_plan import DecodePlan, plan_decodes
from penstock.model.ops.triton.gemv import gemv
from penstock.model.ops.triton.prefill import attend_chunks
from penstock.model.ops.triton.rotary import store_chunks

LEAST_BLOCK_SIZE = 16  # what a matrix product takes; 64 and more is fast


@dataclass(frozen=True)
class Step:
    batch: Batch
    plan: DecodePlan | None


@dataclass(frozen=True)
class TritonKV(LayerKV):
    """Keys and values [num_blocks, kv_heads, block_size, head_dim]: views of all the layers' cache."""

    pool: Tensor  # [layers, 2, num_blocks, kv_heads, block_size, head_dim]


@dataclass(frozen=True)
class GpuLinear:
    """cuBLAS, but for a single row, which it reads the weights too slowly for."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return gemv(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class TritonOps:
    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device = torch.device(device)
        self.weight_dtype = dtype
        self.activation_dtype = dtype
        self.kv_dtype = dtype
        self._num_processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 1
        )
        self._num_kv_heads = 1
        self._step: Step | None = None

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        return GpuLinear(self._store(plain(weight)), None if bias is None else self._store(bias))

    def embedding(self, table: Tensor) -> Linear:
        return partial(F.embedding, weight=self._store(table))

    def tied(self, table: Tensor) -> tuple[Linear, Linear]:
        stored = self._store(table)
        return partial(F.embedding, weight=stored), GpuLinear(stored, None)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rowwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rowwise.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return rowwise.silu_mul(gate_up)

    def norm_linear(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, linear: Linear) -> Tensor:
        return linear(self.add_rms_norm(x, residual, weight, eps))

    def silu_linear(self, gate_up: Tensor, linear: Linear) -> Tensor:
        return linear(self.silu_mul(gate_up))

    def allocate_kv(self, shape: KVShape) -> list[LayerKV]:
        if shape.block_size % LEAST_BLOCK_SIZE:
            message = f"block_size is {shape.block_size}, but a GPU needs a multiple of {LEAST_BLOCK_SIZE}"
            raise ConfigError(message, param="block_size")
        self._num_kv_heads = shape.num_kv_heads
        size = (shape.num_layers, 2, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        pool = torch.zeros(size, dtype=self.kv_dtype, device=self.device)
        return [TritonKV(layer[0], layer[1], shape.block_size, pool) for layer in pool]

    def begin(self, batch: Batch) -> None:
        plan = plan_decodes(batch, self._num_kv_heads, self._num_processors) if batch.num_decodes else None
        self._step = Step(batch, plan)

    def attention(self, qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> Tensor:
        step = self._step
        assert step is not None, "a step must begin first"
        assert step.batch is batch, "another step was begun"
        out = qkv.new_empty(batch.num_tokens, spec.num_heads * spec.head_dim)
        if batch.num_decodes < batch.num_sequences:
            store_chunks(qkv, spec, rope, kv, batch)
            attend_chunks(qkv, spec, rope, kv, batch, out)
        if step.plan is not None:
            attend_decodes(qkv, spec, rope, kv, batch, step.plan, out)
        return out

    def copy_blocks(self, kv: list[LayerKV], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        ids = torch.tensor(pairs, dtype=torch.int64)
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        first = kv[0]
        assert isinstance(first, TritonKV)
        sources, destinations = ids.unbind(1)
        first.pool[:, :, destinations] = first.pool[:, :, sources]

    def _store(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.weight_dtype)

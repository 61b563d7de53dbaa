"""A model whose weights lie on a device, packed for its kernels. It has no cache and no runner yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.model.batch import LayerState
from penstock.model.expert_layers import ExpertLayers
from penstock.model.layers import CausalLM
from penstock.model.ops import KVShape, LayerKV, Ops, Zeros
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.stages import Stage
from penstock.model.states import StateShape, state_shape
from penstock.runner.images import ImageTable
from penstock.runner.kernels import Kernels
from penstock.runner.limits import Limits
from penstock.runner.lora import RunnerAdapters
from penstock.runner.precision import FP8, kv_scale_bytes


@dataclass(frozen=True)
class LoadedModel:
    kernels: Kernels
    ops: Ops
    model: CausalLM  # with adapters, where slots were set aside for them
    limits: Limits
    adapters: RunnerAdapters | None = None  # None: it cannot run any
    ranks: Ranks = field(default_factory=SingleRank)  # those that share the model
    stage: Stage = Stage()  # noqa: RUF009 (frozen)
    experts: ExpertLayers | None = None  # None: it is no mixture
    images: ImageTable | None = None  # None: it takes no images
    kv_scales: tuple[tuple[float, float], ...] = ()  # of each layer's keys and values, as the model's files have them

    def kv_shape(self, num_blocks: int) -> KVShape:
        spec, config = self.model.spec, self.model.config
        num_layers = sum(not config.is_linear(layer) for layer in self.stage.of(config.num_layers))
        tokens = self.ranks.shard.tokens
        block_size = self.limits.block_size // tokens.size
        heads = spec.num_kv_heads, spec.head_dim
        return KVShape(num_layers, num_blocks, block_size, *heads, tokens, spec.value_dim)

    @property
    def kv_share(self) -> float:
        """The share of keys and values, of all the model's heads, layers and tokens, that this rank keeps."""
        shape, config = self.kv_shape(1), self.model.config
        heads = shape.num_kv_heads / config.num_kv_heads / shape.tokens.size
        return heads * shape.num_layers / config.num_attention_layers

    @property
    def block_bytes(self) -> int:
        """Memory of one block of the cache, in all layers."""
        dtype = self.ops.kv_dtype
        return self.kv_shape(1).block_bytes(dtype.itemsize, kv_scale_bytes(dtype))

    @property
    def state_shape(self) -> StateShape | None:
        """Shape of this rank's part of a sequence's recurrent state; None: the model has none."""
        return state_shape(self.model.config, self.ranks.shard, self.stage)

    @property
    def state_bytes(self) -> int:
        """Memory of recurrent states: of as many sequences as may run, of snapshots, and of padding."""
        shape = self.state_shape
        return shape.slot_bytes * (self._num_states + 1) if shape is not None else 0

    @property
    def _num_states(self) -> int:
        return self.limits.max_num_seqs + self.limits.state_snapshots

    def allocate_states(self, zeros: Zeros | None = None) -> list[LayerState]:
        shape = self.state_shape
        return shape.allocate(self._num_states, self.ops.device, zeros) if shape is not None else []

    def allocate_kv(self, num_blocks: int, zeros: Zeros | None = None) -> list[LayerKV]:
        """A cache with the scales of the model's files, where what is stored is scaled by layer."""
        layers = self.ops.allocate_kv(self.kv_shape(num_blocks), zeros)
        if self.ops.kv_dtype is not FP8 or not self.kv_scales:
            return layers
        scaled = zip(layers, self.kv_scales, strict=True)
        return [replace(kv, key_scale=key, value_scale=value) for kv, (key, value) in scaled]

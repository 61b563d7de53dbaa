"""A second, small model beside an assembled one, that guesses for it: on the same device, in the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import KVShape, Ops
from penstock.runner.kernels import Kernels, choose_kernels, make_runner
from penstock.runner.precision import kv_scale_bytes
from penstock.runner.profile import Limits
from penstock.sched.plan import Runner


@dataclass(frozen=True)
class Drafting:
    runner: Runner
    context_length: int  # it has nothing to say beyond


@dataclass(frozen=True)
class SmallModel:
    """Loaded, and without a cache yet."""

    kernels: Kernels
    model: CausalLM
    ops: Ops
    limits: Limits

    @property
    def block_bytes(self) -> int:
        """That it makes each of the large model's blocks larger."""
        dtype = self.ops.kv_dtype
        return self.limits.block_size * self.model.config.kv_bytes_per_token(dtype.itemsize, kv_scale_bytes(dtype))

    def with_cache(self, num_blocks: int) -> Drafting:
        config = self.model.config
        shape = KVShape(config.num_layers, num_blocks, self.limits.block_size, config.num_kv_heads, config.head_dim)
        runner = make_runner(self.kernels, self.model, self.ops, self.ops.allocate_kv(shape), self.limits)
        return Drafting(runner, self.limits.max_model_len)


def load_small(
    checkpoint: Checkpoint, settings: EngineSettings, device: torch.device, limits: Limits, num_drafts: int
) -> SmallModel:
    """`settings` and `limits` are the large model's; how its weights are to be quantized is its own affair."""
    config = checkpoint.config
    kernels = choose_kernels(config, replace(settings, quant="auto", kv_dtype="auto"), device)
    ops = kernels.make_ops()
    longest = min(limits.max_model_len, config.context_length)
    model = load_model(checkpoint, ops, quantize=kernels.quantize, max_context=longest)
    # All guesses of a step are launched before one is read.
    return SmallModel(kernels, model, ops, replace(limits, max_model_len=longest, num_ahead=num_drafts))

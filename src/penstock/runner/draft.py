"""A second, small model beside an assembled one, that guesses for it: on the same device, in the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.model.loading import load_model
from penstock.model.ops import KVShape
from penstock.runner.assemble import Assembly, Phase
from penstock.runner.kernels import choose_kernels
from penstock.runner.runner import ModelRunner
from penstock.sched.plan import Runner


@dataclass(frozen=True)
class DraftAssembly:
    runner: Runner
    kv_bytes: int


def assemble_draft(checkpoint: Checkpoint, settings: EngineSettings, large: Assembly, phase: Phase) -> DraftAssembly:
    """`settings` are the large model's; how its weights are to be quantized is its own affair."""
    config = checkpoint.config
    kernels = choose_kernels(config, replace(settings, quant="auto", kv_dtype="auto"), torch.device(large.device))
    ops = kernels.make_ops()
    model = load_model(
        checkpoint, ops, quantize=kernels.quantize, progress=lambda done, total: phase("draft", done, total)
    )
    shape = KVShape(config.num_layers, large.num_blocks, large.block_size, config.num_kv_heads, config.head_dim)
    block_bytes = large.block_size * config.kv_bytes_per_token(ops.kv_dtype.itemsize)
    return DraftAssembly(ModelRunner(model, ops, ops.allocate_kv(shape)), large.num_blocks * block_bytes)

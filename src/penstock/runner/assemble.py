"""From settings and a checkpoint to a runner: which device, which kernels, which number format, how many blocks.

Every "auto" is resolved here, once; what it came to is in `Assembly`, for whoever prints it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import KVShape, LayerKV, Ops
from penstock.model.ops.formats import choose_format
from penstock.model.ops.reference import ReferenceOps
from penstock.runner.memory import num_blocks
from penstock.runner.runner import ModelRunner
from penstock.sched.plan import Runner

log = logging.getLogger("penstock.runner")


@dataclass(frozen=True)
class Defaults:
    max_num_seqs: int
    chunk_tokens: int
    block_size: int


DEFAULTS = {"cpu": Defaults(64, 512, 16), "cuda": Defaults(256, 8192, 64)}


@dataclass(frozen=True)
class Assembly:
    runner: Runner
    device: str
    kernels: str
    number_format: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    chunk_tokens: int
    max_model_len: int
    kv_bytes: int


def assemble(checkpoint: Checkpoint, settings: EngineSettings, phase: Callable[[str, int, int], None]) -> Assembly:
    config = checkpoint.config
    max_model_len = _max_model_len(config, settings)
    device = _device(settings.device)
    defaults = DEFAULTS[device.type]
    block_size = settings.block_size or defaults.block_size
    chunk_tokens = settings.chunk_tokens or defaults.chunk_tokens
    max_num_seqs = min(settings.max_num_seqs or defaults.max_num_seqs, chunk_tokens)
    phase("kernels", 0, 0)
    ops, kernels, number_format = _ops(device, settings)
    phase("weights", 0, config.num_layers)
    model = load_model(checkpoint, ops, progress=lambda done, total: phase("weights", done, total))
    phase("cache", 0, 0)
    width = torch.empty((), dtype=ops.weight_dtype).element_size()
    blocks = num_blocks(config, block_size, bytes_per_value=width, device=device, fraction=settings.memory_fraction)
    shape = KVShape(config.num_layers, blocks, block_size, config.num_kv_heads, config.head_dim)
    max_model_len = min(max_model_len, blocks * block_size)
    kv = ops.allocate_kv(shape)
    runner: Runner
    if kernels == "triton":
        phase("graphs", 0, 0)
        runner = _gpu_runner(model, ops, kv, max_num_seqs, chunk_tokens, table_width=-(-max_model_len // block_size))
    else:
        runner = ModelRunner(model, ops, kv)
    return Assembly(
        runner=runner,
        device=str(device),
        kernels=kernels,
        number_format=number_format,
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        max_model_len=max_model_len,
        kv_bytes=blocks * block_size * config.kv_bytes_per_token(width),
    )


def _max_model_len(config: ModelConfig, settings: EngineSettings) -> int:
    wanted = settings.max_model_len or config.context_length
    if wanted > config.context_length:  # there are no rotary angles beyond it
        message = f"max_model_len is {wanted}, but the model's context ends at {config.context_length}"
        raise ConfigError(message, param="max_model_len")
    return wanted


def _device(wanted: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if wanted == "auto":
        wanted = "cuda" if has_gpu else "cpu"
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    return torch.device(wanted)


def _ops(device: torch.device, settings: EngineSettings) -> tuple[Ops, str, str]:
    """The operations, what they are written in, and the number format they were chosen for."""
    if device.type == "cuda":
        dtype = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
        return *_gpu_ops(device, dtype), str(dtype).removeprefix("torch.")
    if settings.dtype == "float16":
        raise ConfigError("float16 is for GPUs; on a CPU use bfloat16 or float32", param="dtype")
    threads = settings.threads or len(os.sched_getaffinity(0))
    chosen = choose_format(settings.dtype, threads)
    if chosen.fallback_reason is not None:
        log.warning("no native kernels (%s); running on torch, which is slower", chosen.fallback_reason)
    # The kernels have threads of their own; two pools would fight for the cores.
    torch.set_num_threads(1 if chosen.kernels == "native" else threads)
    return chosen.ops(threads), "native" if chosen.kernels == "native" else "torch", chosen.arithmetic


def _gpu_ops(device: torch.device, dtype: torch.dtype) -> tuple[Ops, str]:
    try:
        from penstock.model.ops.triton import TritonOps
    except ModuleNotFoundError as error:
        log.warning("no GPU kernels (%s); running on torch, which is slower", error)
        return ReferenceOps(device, dtype), "torch"
    return TritonOps(device, dtype), "triton"


def _gpu_runner(
    model: CausalLM, ops: Ops, kv: list[LayerKV], max_num_seqs: int, chunk_tokens: int, *, table_width: int
) -> Runner:
    from penstock.model.ops.triton import TritonOps
    from penstock.runner.cuda_runner import CudaRunner  # needs Triton, which only a GPU's torch brings

    assert isinstance(ops, TritonOps)
    runner = CudaRunner(model, ops, kv, max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens, table_width=table_width)
    runner.capture()
    return runner

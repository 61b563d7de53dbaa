"""From settings and a checkpoint to a runner: which device, which kernels, which number formats, how many blocks.

Every "auto" is resolved here, once; what it came to is in `Assembly`, for whoever prints it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock.core.context import longest_context
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.core.speculating import most_drafts
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.encoder import Pooling, read_pooling
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops import KVShape, LayerKV, Ops
from penstock.model.weights import Site
from penstock.quant import Quant
from penstock.runner.draft import Drafting, load_small
from penstock.runner.embedder import DecoderEmbedder
from penstock.runner.kernels import choose_kernels, compiling_ahead, make_host_copies, make_runner
from penstock.runner.lora import RunnerAdapters
from penstock.runner.memory import blocks_on_cpu, blocks_on_gpu, blocks_on_host, free_bytes, staged
from penstock.runner.moving import BlockMover
from penstock.runner.precision import FP8, kv_scale_bytes, name
from penstock.runner.profile import Limits, profile, told_if_too_large
from penstock.sched.plan import Runner

log = logging.getLogger("penstock.runner")

_MAX_ROWS = 160  # of a step with drafts, where there are not as many sequences: more would hardly pay

Phase = Callable[[str, int, int], None]  # (name, parts done, parts in all; 0: unknown)


@dataclass(frozen=True)
class Defaults:
    max_num_seqs: int
    chunk_tokens: int
    block_size: int
    max_loras: int  # on a GPU each takes memory, and graphs of their own: they are asked for


DEFAULTS = {"cpu": Defaults(64, 512, 16, 8), "cuda": Defaults(256, 8192, 64, 0)}


@dataclass(frozen=True)
class Assembly:
    runner: Runner
    device: str
    kernels: str
    number_format: str  # of activations, and of weights that are not quantized
    quant: Quant  # of linear weights
    kv_dtype: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    chunk_tokens: int
    max_model_len: int
    kv_bytes: int
    host_blocks: int = 0  # more of them, in host memory
    copy_s: float = 0.0  # to copy one of those there and back
    device_name: str = ""  # as its driver calls it
    device_uuid: str = ""  # of a GPU: by it others know which one is ours
    draft: Drafting | None = None  # a small model in the same blocks
    most_rows: int = 0  # of a step with drafts, if it is captured
    adapters: RunnerAdapters | None = None  # None: it cannot run any
    embedder: DecoderEmbedder | None = None  # None: it makes no vectors


def assemble(
    checkpoint: Checkpoint, settings: EngineSettings, phase: Phase, draft: Checkpoint | None = None
) -> Assembly:
    """`draft`: of a small model, to guess with."""
    config = checkpoint.config
    device = _device(settings.device)
    limits = _with_drafts(_limits(config, settings, DEFAULTS[device.type]), settings, device)
    phase("kernels", 0, 0)
    free_before_bytes = free_bytes(device)
    kernels = choose_kernels(config, settings, device)
    ops = kernels.make_ops()
    phase("weights", 0, config.num_layers)
    sites: list[Site] = []
    num_loras = settings.max_loras if settings.max_loras is not None else DEFAULTS[device.type].max_loras
    with (
        told_if_too_large("the model", "use a smaller one, or quant int4"),
        compiling_ahead(kernels, config, limits, adapts=num_loras > 0),
    ):
        model = load_model(
            checkpoint,
            ops,
            quantize=kernels.quantize,
            progress=lambda done, total: phase("weights", done, total),
            max_context=limits.max_model_len,
            sites=sites,
        )
    base = model
    adapters: RunnerAdapters | None = None
    if num_loras:
        with told_if_too_large("what is set aside for adapters", "lower max_loras or max_lora_rank"):
            model = adapted = with_adapters(model, sites, ops, num_loras, max_rank=settings.max_lora_rank)
        adapters = RunnerAdapters(adapted.bank)
    shape = KVShape(config.num_layers, 1, limits.block_size, config.num_kv_heads, config.head_dim)
    block_bytes = limits.block_size * config.kv_bytes_per_token(ops.kv_dtype.itemsize, kv_scale_bytes(ops.kv_dtype))
    embedder = DecoderEmbedder(base, ops, shape, _pooling(checkpoint, settings), limits.chunk_tokens)
    host_blocks = blocks_on_host(settings.host_kv_gib, block_bytes) if settings.prefix_cache else 0
    staging_blocks = 0
    small = None
    if draft is not None:
        phase("draft", 0, 0)
        with told_if_too_large("the model to draft with", "use a smaller one, or none"):
            small = load_small(draft, settings, device, limits, most_drafts(settings, overlaps=device.type == "cuda"))
    all_bytes = block_bytes + (small.block_bytes if small is not None else 0)
    if device.type == "cuda":
        phase("profile", 0, 0)
        with told_if_too_large("the largest step", "lower chunk_tokens or max_num_seqs"):
            memory = profile(
                lambda: (
                    make_runner(kernels, model, ops, _cache(ops, shape, checkpoint), limits, adapters),
                    small.with_cache(1) if small is not None else None,
                ),
                device,
                free_before_bytes,
            )
        blocks = blocks_on_gpu(memory, all_bytes, fraction=settings.memory_fraction)
        staging_blocks = staged(blocks) if host_blocks else 0
        blocks -= staging_blocks
    else:
        blocks = blocks_on_cpu(config.context_length, limits.block_size, all_bytes, fraction=settings.memory_fraction)
    limits = _within(limits, blocks)
    phase("cache", 0, 0)
    kv = _cache(ops, replace(shape, num_blocks=blocks), checkpoint)
    ops.settle_kv(kv)
    mover = None
    if host_blocks:
        mover = BlockMover(ops, kv, make_host_copies(kernels, ops, kv, host_blocks, staging_blocks))
    if device.type == "cuda":
        phase("graphs", 0, 0)
    runner = make_runner(kernels, model, ops, kv, limits, adapters, mover)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Assembly(
        runner=runner,
        device=str(device),
        kernels=kernels.name,
        number_format=kernels.number_format,
        quant=kernels.quant,
        kv_dtype=name(ops.kv_dtype),
        num_blocks=blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        chunk_tokens=limits.chunk_tokens,
        max_model_len=limits.max_model_len,
        kv_bytes=blocks * block_bytes,
        host_blocks=host_blocks,
        copy_s=mover.measure() if mover is not None else 0.0,
        device_name=gpu.name if gpu else "",
        device_uuid=f"GPU-{gpu.uuid}" if gpu else "",
        draft=small.with_cache(blocks) if small is not None else None,
        most_rows=limits.most_rows,
        adapters=adapters,
        embedder=embedder,
    )


def _pooling(checkpoint: Checkpoint, settings: EngineSettings) -> Pooling:
    if settings.pooling != "auto":
        return settings.pooling
    return (read_pooling(checkpoint.path) if checkpoint.path.is_dir() else None) or "mean"


def _device(wanted: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if wanted == "auto":
        wanted = "cuda" if has_gpu else "cpu"
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    return torch.device(wanted)


def _limits(config: ModelConfig, settings: EngineSettings, defaults: Defaults) -> Limits:
    chunk_tokens = settings.chunk_tokens or defaults.chunk_tokens
    return Limits(
        block_size=settings.block_size or defaults.block_size,
        max_num_seqs=min(settings.max_num_seqs or defaults.max_num_seqs, chunk_tokens),
        chunk_tokens=chunk_tokens,
        max_model_len=longest_context(settings, config),
    )


def _with_drafts(limits: Limits, settings: EngineSettings, device: torch.device) -> Limits:
    """On a GPU, where a step with drafts is captured as any other, for up to so many tokens."""
    num_drafts = most_drafts(settings, overlaps=True) if device.type == "cuda" else 0
    if not num_drafts:
        return limits
    most_rows = min(limits.max_num_seqs * (1 + num_drafts), _MAX_ROWS)
    return replace(limits, most_rows=max(most_rows, limits.max_num_seqs))


def _within(limits: Limits, num_blocks: int) -> Limits:
    """A sequence must fit into the cache by itself."""
    capacity = num_blocks * limits.block_size
    if capacity < limits.max_model_len:
        log.warning("max_model_len is %d, not %d: the KV cache has no room for more", capacity, limits.max_model_len)
    return replace(limits, max_model_len=min(limits.max_model_len, capacity))


def _cache(ops: Ops, shape: KVShape, checkpoint: Checkpoint) -> list[LayerKV]:
    """With the scales of the model's files, where what is stored is scaled."""
    layers = ops.allocate_kv(shape)
    if ops.kv_dtype is not FP8:
        return layers
    scales = [checkpoint.kv_scales(layer) for layer in range(shape.num_layers)]
    return [replace(kv, key_scale=key, value_scale=value) for kv, (key, value) in zip(layers, scales, strict=True)]

"""Build: the cache, the copies to host memory, graphs and runners of an engine whose weights and size are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.model.ops import LayerKV
from penstock.quant import Quant
from penstock.runner.embedder import DecoderEmbedder
from penstock.runner.load import LoadedEngine, Phase
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.lora import RunnerAdapters
from penstock.runner.make_runner import make_runner
from penstock.runner.moving import BlockMover, HostCopies, PlainCopies
from penstock.runner.precision import name
from penstock.runner.size import EngineSize
from penstock.sched.plan import Runner


@dataclass(frozen=True)
class Drafting:
    runner: Runner
    context_length: int  # it has nothing to say beyond


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


def build(loaded: LoadedEngine, size: EngineSize, phase: Phase) -> Assembly:
    target, draft = replace(loaded.target, limits=size.limits), loaded.draft
    kernels, ops, device = target.kernels, target.ops, target.ops.device
    phase("cache", 0, 0)
    kv = target.allocate_kv(size.num_blocks)
    ops.settle_kv(kv)
    mover = BlockMover(ops, kv, _host_copies(target, kv, size)) if size.host_blocks else None
    if device.type == "cuda":
        phase("graphs", 0, 0)
    runner = make_runner(target, kv, mover)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    limits = size.limits
    return Assembly(
        runner=runner,
        device=str(device),
        kernels=kernels.name,
        number_format=kernels.number_format,
        quant=kernels.quant,
        kv_dtype=name(ops.kv_dtype),
        num_blocks=size.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        chunk_tokens=limits.chunk_tokens,
        max_model_len=limits.max_model_len,
        kv_bytes=size.kv_bytes,
        host_blocks=size.host_blocks,
        copy_s=mover.measure() if mover is not None else 0.0,
        device_name=gpu.name if gpu else "",
        device_uuid=f"GPU-{gpu.uuid}" if gpu else "",
        draft=_drafting(draft, size.num_blocks) if draft is not None else None,
        most_rows=limits.most_rows,
        adapters=target.adapters,
        embedder=loaded.embedder,
    )


def _drafting(draft: LoadedModel, num_blocks: int) -> Drafting:
    return Drafting(make_runner(draft, draft.allocate_kv(num_blocks)), draft.limits.max_model_len)


def _host_copies(target: LoadedModel, kv: list[LayerKV], size: EngineSize) -> HostCopies:
    if target.kernels.name != "triton":
        return PlainCopies(target.ops, kv, size.host_blocks)
    from penstock.runner.cuda_moving import CudaCopies  # late: it needs Triton

    return CudaCopies(kv, size.host_blocks, size.staging_blocks)

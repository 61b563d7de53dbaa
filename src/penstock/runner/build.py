"""Build: the cache, the copies to host memory, graphs and runners of an engine whose weights and size are known."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.model.ops import LayerKV, Zeros
from penstock.model.ops.native import NativeOps
from penstock.model.ops.packed_cache import code_identity
from penstock.runner.assembly import Assembly, Device, Drafting, Formats
from penstock.runner.experts import RankExperts
from penstock.runner.load import LoadedEngine, Phase
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.make_runner import make_runner
from penstock.runner.moving import BlockMover, HostCopies, PlainCopies
from penstock.runner.parking import CpuMemory
from penstock.runner.precision import name
from penstock.runner.size import EngineSize
from penstock.runner.virtual_memory import VirtualMemory


def build(loaded: LoadedEngine, size: EngineSize, phase: Phase) -> Assembly:
    target, draft = replace(loaded.target, limits=size.limits), loaded.draft
    kernels, ops, device = target.kernels, target.ops, target.ops.device
    phase("cache", 0, 0)
    zeros = loaded.memory.zeros if loaded.memory is not None else None
    kv = target.allocate_kv(size.num_blocks, loaded.kv_home.zeros if loaded.kv_home is not None else None)
    settling = ops.settle_kv(kv)
    host = _host_copies(target, kv, size) if size.host_blocks else None
    mover = BlockMover(ops, kv, host) if host is not None else None
    if device.type == "cuda":
        phase("graphs", 0, 0)
    states = target.allocate_states(loaded.memory.zeros if loaded.memory is not None else None)
    runner = make_runner(target, kv, mover, states)
    drafting, drafts_kv = _drafting(draft, size.num_blocks, zeros) if draft is not None else (None, [])
    memory: CpuMemory | VirtualMemory | None = loaded.memory
    if device.type == "cpu":
        memory = CpuMemory(ops, [*kv, *drafts_kv], loaded.embedder, settling=settling, states=states)
    return Assembly(
        runner=runner,
        rank_runner=runner,
        device=_described(device),
        formats=Formats(kernels.name, kernels.number_format, kernels.quant, name(ops.kv_dtype)),
        size=size,
        kv_share=target.kv_share,
        copy_s=mover.measure() if mover is not None else 0.0,
        host=host,
        kv_layout=_kv_layout(loaded.target, kv) if host is not None else "",
        draft=drafting,
        adapters=target.adapters,
        # Texts of embeddings and scores are computed without slots, and so without states.
        embedder=loaded.embedder if target.state_shape is None else None,
        memory=memory,
        experts=_rank_experts(target, loaded.memory),
        kv=kv,
        kv_home=loaded.kv_home,
        state_bytes=target.state_bytes,
    )


def _rank_experts(target: LoadedModel, memory: VirtualMemory | None) -> RankExperts | None:
    if target.experts is None:
        return None
    return RankExperts(target.experts, memory.change if memory is not None else lambda: None)


def _described(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(str(device))
    gpu = torch.cuda.get_device_properties(device)
    return Device(str(device), gpu.name, f"GPU-{gpu.uuid}")


def _drafting(draft: LoadedModel, num_blocks: int, zeros: Zeros | None) -> tuple[Drafting, list[LayerKV]]:
    kv = draft.allocate_kv(num_blocks, zeros)
    return Drafting(make_runner(draft, kv), draft.limits.max_model_len), kv


def _kv_layout(target: LoadedModel, kv: list[LayerKV]) -> str:
    """All, but for the model's files, that the bytes of a block depend on."""
    kernels, ops = target.kernels, target.ops
    shapes = [(cache.shape[1:], cache.dtype) for layer in kv for cache in layer.caches]
    formats = kernels.name, kernels.number_format, kernels.quant, name(ops.kv_dtype), target.limits.max_model_len
    library = (ops.library._name, ops.arithmetic, ops.kv_arithmetic) if isinstance(ops, NativeOps) else ()
    libraries = torch.__version__, torch.version.cuda, _described(ops.device).driver_name, library
    return repr((target.model.config, shapes, formats, libraries, code_identity("model", "quant", "runner")))


def _host_copies(target: LoadedModel, kv: list[LayerKV], size: EngineSize) -> HostCopies:
    if target.kernels.name != "triton":
        return PlainCopies(target.ops, kv, size.host_blocks)
    from penstock.runner.cuda_moving import CudaCopies  # late: it needs Triton

    return CudaCopies(kv, size.host_blocks, size.staging_blocks)

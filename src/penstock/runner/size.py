"""Size: how many blocks of KV cache the device and the host have room for, and so how long a sequence may become."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.core.settings import EngineSettings
from penstock.model.ops.packed_cache import code_identity
from penstock.runner.limits import Limits
from penstock.runner.load import LoadedEngine, Phase
from penstock.runner.make_runner import make_runner
from penstock.runner.memory import blocks_asked_for, blocks_on_cpu, blocks_on_gpu, blocks_on_host, staged
from penstock.runner.profile import profile, told_if_too_large
from penstock.runner.rehearsal_note import RehearsalNote


@dataclass(frozen=True)
class EngineSize:
    limits: Limits
    num_blocks: int
    kv_bytes: int  # of these blocks; what a model to draft with adds to them is not counted
    host_blocks: int = 0  # more of them, in host memory
    staging_blocks: int = 0  # of the device's memory, for blocks on their way; only a GPU needs some

    def with_blocks(self, num_blocks: int) -> EngineSize:
        """The size with so many blocks of KV cache instead."""
        block_bytes = self.kv_bytes // self.num_blocks
        return replace(
            self, limits=self.limits.within(num_blocks), num_blocks=num_blocks, kv_bytes=num_blocks * block_bytes
        )


def size(loaded: LoadedEngine, settings: EngineSettings, phase: Phase) -> EngineSize:
    target, draft, limits = loaded.target, loaded.draft, loaded.target.limits
    all_bytes = target.block_bytes + (draft.block_bytes if draft is not None else 0)
    host_blocks = blocks_on_host(settings.host_kv_gib, target.block_bytes) if settings.prefix_cache else 0
    staging_blocks = 0
    if target.ops.device.type == "cuda":
        phase("profile", 0, 0)
        blocks = _blocks_on_gpu(loaded, all_bytes, settings)
        staging_blocks = staged(blocks) if host_blocks else 0
        blocks -= staging_blocks
    else:
        fraction = 1.0 if settings.kv_gib is not None else settings.memory_fraction
        blocks = blocks_on_cpu(
            target.model.config.context_length,
            limits.block_size,
            all_bytes,
            fraction=fraction,
            state_bytes=target.state_bytes,  # on a GPU the rehearsal takes them
        )
    if settings.kv_gib is not None:
        blocks = blocks_asked_for(settings.kv_gib, blocks, all_bytes)
    return EngineSize(limits.within(blocks), blocks, blocks * target.block_bytes, host_blocks, staging_blocks)


def _blocks_on_gpu(loaded: LoadedEngine, block_bytes: int, settings: EngineSettings) -> int:
    models = [model for model in (loaded.target, loaded.draft) if model is not None]
    with told_if_too_large("the largest step", "lower chunk_tokens or max_num_seqs"):
        memory = profile(
            lambda: [make_runner(model, model.allocate_kv(1)) for model in models],
            loaded.target.ops.device,
            loaded.free_before_bytes,
            rehearsal_note(loaded, settings),
        )
    return blocks_on_gpu(memory, block_bytes, fraction=settings.memory_fraction)


def rehearsal_note(loaded: LoadedEngine, settings: EngineSettings) -> RehearsalNote | None:
    """The note about engines of this kind on a GPU of this kind. None: other ranks have the rest of the model. Ranks
    rehearse together or not at all, so none of them may find a note that another does not."""
    if loaded.target.ranks.shard.size > 1 or not loaded.target.stage.is_alone:
        return None
    models = [model for model in (loaded.target, loaded.draft) if model is not None]
    gpu = torch.cuda.get_device_properties(loaded.target.ops.device)
    kinds = [(each.model.config, each.limits, each.kernels.number_format, each.kernels.quant) for each in models]
    libraries = (torch.__version__, torch.version.cuda, gpu.name, gpu.total_memory)
    return RehearsalNote.about(repr((kinds, settings, libraries, code_identity("model", "quant", "runner"))))

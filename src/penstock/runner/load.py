"""Load: from checkpoints to weights on the device, packed for kernels that are chosen for it. No cache yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.expert_placement import ExpertSharing
from penstock.core.settings import EngineSettings
from penstock.core.speculating import most_drafts
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.encoder import Pooling, read_pooling
from penstock.model.expert_layers import ExpertLayers
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops import Ops
from penstock.model.ops.native import NativeOps
from penstock.model.ops.packed_cache import PackedCache, files_identity
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.stages import Stage
from penstock.model.vision.loading import load_vision
from penstock.model.weights import Site
from penstock.runner.embedder import DecoderEmbedder
from penstock.runner.experts import read_expert_counts
from penstock.runner.images import ImageTable
from penstock.runner.kernels import choose_kernels
from penstock.runner.kv_memory import SharedCache
from penstock.runner.limits import Limits, resolve_limits, resolve_max_loras
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.lora import RunnerAdapters
from penstock.runner.make_runner import compiling_ahead
from penstock.runner.memory import free_bytes
from penstock.runner.profile import told_if_too_large
from penstock.runner.ranks.join import device_of
from penstock.runner.rehome import rehome, tensors_of
from penstock.runner.virtual_memory import Keep, VirtualMemory

Phase = Callable[[str, int, int], None]  # (name, parts done, parts in all; 0: unknown)


@dataclass(frozen=True)
class LoadedEngine:
    """All weights of one engine."""

    target: LoadedModel  # whose answers are given
    draft: LoadedModel | None  # a small one that guesses for it, in the same blocks
    embedder: DecoderEmbedder  # on a GPU it has its own blocks already, before the cache takes the rest
    free_before_bytes: int  # of the device's memory, before this engine put anything there
    memory: VirtualMemory | None = None  # where the weights are, if they can be given back
    kv_home: SharedCache | VirtualMemory | None = None  # where the KV cache will be; None: wherever torch puts it


def load(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    phase: Phase,
    draft: Checkpoint | None = None,
    ranks: Ranks | None = None,
    stage: Stage = Stage(),  # noqa: B008 (frozen)
    device: torch.device | None = None,
) -> LoadedEngine:
    """`ranks`: those that share the model, of which this is one; None: it has all of it. `stage`: its layers;
    `device`: its own; None: by the settings. A model to draft with is never shared."""
    ranks = ranks or SingleRank()
    device = device or device_of(settings.device)
    limits = resolve_limits(checkpoint.config, settings, device.type)
    limits = replace(limits, num_ahead=max(limits.num_ahead, settings.pp or 1))
    phase("kernels", 0, 0)
    free_before_bytes = free_bytes(device)
    target, embedder = _load_target(checkpoint, settings, device, limits, phase, ranks, stage)
    small = None
    if draft is not None:
        phase("draft", 0, 0)
        with told_if_too_large("the model to draft with", "use a smaller one, or none"):
            small = _load_draft(draft, settings, device, limits)
    loaded = LoadedEngine(target, small, embedder, free_before_bytes)
    if device.type == "cuda" and settings.parkable:
        phase("move", 0, 0)
        memory = _parkable(loaded, device)
        return replace(loaded, memory=memory, kv_home=memory)
    # The first of several ranks reaches the caches of all, whatever moves their blocks.
    is_shared = settings.kv_mover in ("auto", "shm", "cuda") or ranks.shard.size > 1 or not stage.is_alone
    if settings.kv_port is not None and is_shared:
        return replace(loaded, kv_home=_exportable(device))
    return loaded


def _exportable(device: torch.device) -> SharedCache | VirtualMemory:
    """Memory for a KV cache that other processes may map."""
    if device.type != "cuda":
        return SharedCache()
    from penstock.runner.cuda_driver import CudaDriver

    return VirtualMemory(CudaDriver(device), lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


def _parkable(loaded: LoadedEngine, device: torch.device) -> VirtualMemory:
    """All that lies on the device, moved to where it can be given back."""
    from penstock.runner.cuda_driver import CudaDriver
    from penstock.runner.pinned import PinnedMemory

    pinned: list[PinnedMemory] = []  # which must outlive what is made of it

    def pin(num_bytes: int) -> Tensor:
        pinned.append(PinnedMemory(num_bytes, wanted_by="parking", param=None))
        return pinned[-1].bytes

    memory = VirtualMemory(CudaDriver(device), pin)
    models = [model for model in (loaded.target, loaded.draft) if model is not None]
    rehome(
        memory,
        tensors_of([model.adapters.slots for model in models if model.adapters is not None]),
        Keep.ALWAYS,
        device,
    )
    rehome(memory, tensors_of(loaded.embedder.blocks), Keep.NEVER, device)
    counts = [each for model in models if model.experts is not None for each in model.experts.changing]
    stay = {each.untyped_storage().data_ptr() for each in counts}  # they are read while the engine is parked, too
    weights = tensors_of([(model.model, model.images) for model in models])
    moved = (each for each in weights if each.untyped_storage().data_ptr() not in stay)
    rehome(memory, moved, Keep.ONCE, device)
    return memory


def _load_target(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    device: torch.device,
    limits: Limits,
    phase: Phase,
    ranks: Ranks,
    stage: Stage,
) -> tuple[LoadedModel, DecoderEmbedder]:
    """The model gets slots for adapters, if there are to be any. Vectors are made without them."""
    config = checkpoint.config
    kernels = choose_kernels(config, settings, device)
    ops = kernels.make_ops()
    num_loras = resolve_max_loras(settings, device.type)
    phase("weights", 0, config.num_layers)
    sites: list[Site] = []
    experts = _experts(checkpoint, settings, ops, ranks)
    with (
        told_if_too_large("the model", "use a smaller one, or quant int4"),
        compiling_ahead(kernels, config, limits, ranks.shard, adapts=num_loras > 0),
    ):
        packed = _packed_cache(checkpoint, ops, settings, f"{ranks.shard} {settings.ep} {stage.layers}")
        model = load_model(
            checkpoint,
            ops,
            quantize=kernels.quantize,
            progress=lambda done, total: phase("weights", done, total),
            max_context=limits.max_model_len,
            sites=sites,
            ranks=ranks,
            experts=experts,
            stage=stage,
            packed=packed,
        )
    if packed is not None:
        packed.save_later()
    scales = tuple(checkpoint.kv_scales(layer) for layer in stage.of(config.num_layers))
    loaded = LoadedModel(kernels, ops, model, limits, kv_scales=scales, ranks=ranks, stage=stage, experts=experts)
    if num_loras:
        with told_if_too_large("what is set aside for adapters", "lower max_loras or max_lora_rank"):
            adapted = with_adapters(model, sites, ops, num_loras, max_rank=settings.max_lora_rank, stage=stage)
        loaded = replace(loaded, model=adapted, adapters=RunnerAdapters(adapted.bank))
    with told_if_too_large("the encoder of images", "lower max_image_tokens"):
        loaded = replace(loaded, images=_images(checkpoint, ops, limits))
    pooling = _pooling(checkpoint, settings)
    return loaded, DecoderEmbedder(model, ops, loaded.kv_shape(1), pooling, limits.chunk_tokens)


def _images(checkpoint: Checkpoint, ops: Ops, limits: Limits) -> ImageTable | None:
    encoder = load_vision(checkpoint, ops) if limits.image_tokens else None
    if encoder is None:
        return None
    columns = encoder.config.levels * checkpoint.config.hidden_size
    return ImageTable(encoder, limits.image_tokens, columns, ops.activation_dtype)


def _experts(checkpoint: Checkpoint, settings: EngineSettings, ops: Ops, ranks: Ranks) -> ExpertLayers | None:
    """Experts of the model as the ranks share and count them; None: it is no mixture."""
    config = checkpoint.config
    if config.experts is None:
        return None
    sharing = None
    if (settings.ep or 1) > 1:
        counts = read_expert_counts(settings.expert_counts) if settings.expert_counts else {}
        sharing = ExpertSharing(settings.redundant_experts, counts)
    return ExpertLayers.of(ops, ranks.shard, config.num_layers, config.experts.count, sharing)


def _load_draft(checkpoint: Checkpoint, settings: EngineSettings, device: torch.device, limits: Limits) -> LoadedModel:
    """`settings` and `limits` are the large model's; how its weights are to be quantized is its own affair."""
    own_settings = replace(settings, quant="auto", kv_dtype="auto")
    kernels = choose_kernels(checkpoint.config, own_settings, device)
    ops = kernels.make_ops()
    longest = min(limits.max_model_len, checkpoint.config.context_length)
    packed = _packed_cache(checkpoint, ops, own_settings)
    model = load_model(checkpoint, ops, quantize=kernels.quantize, max_context=longest, packed=packed)
    if packed is not None:
        packed.save_later()
    # All guesses of a step are launched before one is read.
    num_drafts = most_drafts(settings, overlaps=device.type == "cuda")
    return LoadedModel(kernels, ops, model, replace(limits, max_model_len=longest, num_ahead=num_drafts))


def _packed_cache(
    checkpoint: Checkpoint,
    ops: Ops,
    settings: EngineSettings,
    part: str = "",
) -> PackedCache | None:
    """None: weights for other kernels take no packing that would be worth keeping, and random ones are not kept."""
    if not isinstance(ops, NativeOps) or isinstance(checkpoint, RandomCheckpoint):
        return None
    return PackedCache(ops, f"{files_identity(checkpoint.path)}\n{settings.quant} {settings.dtype} {part}")


def _pooling(checkpoint: Checkpoint, settings: EngineSettings) -> Pooling:
    if settings.pooling != "auto":
        return settings.pooling
    return (read_pooling(checkpoint.path) if checkpoint.path.is_dir() else None) or "mean"

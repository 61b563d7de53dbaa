"""An engine around an encoder: no cache, no scheduler, whole texts in and vectors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError
from penstock.core.measurements import ServingLimits
from penstock.core.settings import EngineSettings
from penstock.engine.embedding import EmbedQueue
from penstock.engine.encoder import EncoderEngine
from penstock.engine.messages import EngineInfo

if TYPE_CHECKING:
    from penstock.engine_process.phases import Phases
    from penstock.hub.encoder import EncoderCheckpoint

_TEXTS = 512  # that a gateway may think are room for: texts wait in the engine, which needs no cache for them


def build_encoder(
    checkpoint: EncoderCheckpoint, settings: EngineSettings, phases: Phases
) -> tuple[EncoderEngine, EngineInfo]:
    import torch

    from penstock.runner.embedder import encoder_embedder

    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    device = torch.device("cuda" if has_gpu and settings.device != "cpu" else "cpu")
    torch.set_num_threads(settings.threads or usable_cores())
    phases("weights", 0, checkpoint.config.num_layers)
    # A CPU has no arithmetic of less than float32 that would be faster here.
    number_format = settings.dtype if device.type == "cuda" and settings.dtype != "auto" else "float32"
    pooling = None if settings.pooling == "auto" else settings.pooling
    embedder = encoder_embedder(checkpoint, device, pooling, getattr(torch, number_format))
    phases.close()
    longest = checkpoint.config.context_length
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    info = EngineInfo(
        device=str(device),
        number_format=number_format,
        quant="none",
        kv_dtype="none",
        kernels="torch",
        limits=ServingLimits(
            max_num_seqs=_TEXTS,
            chunk_tokens=embedder.most_tokens,
            max_model_len=min(settings.max_model_len or longest, longest),
            block_size=longest,
            kv_capacity_tokens=_TEXTS * longest,
        ),
        kv_bytes=0,
        startup_s=phases.seconds,
        startup_cpu_s={"process": round(phases.began_cpu_s, 3), **phases.cpu_seconds},
        began_s=phases.began_s,
        device_name=gpu.name if gpu else "",
        device_uuid=f"GPU-{gpu.uuid}" if gpu else "",
        generates=False,
        embeds=True,
    )
    return EncoderEngine(EmbedQueue(embedder)), info

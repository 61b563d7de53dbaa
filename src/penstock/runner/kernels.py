"""Choice of a model's kernels and their number formats. Modules that need Triton are imported here, and late."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from penstock.core.cores import usable_cores
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.hub.home import penstock_home
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.formats import Format, choose_format
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized.mxfp4 import BITS as MXFP4_BITS
from penstock.model.weights import Quantize
from penstock.quant import Quant, as_stored, to_quant
from penstock.runner.precision import fp8_obstacle, int8_kv_obstacle, name, resolve_kv_dtype, resolve_quant

log = logging.getLogger("penstock.runner")

_BITS: dict[Quant, int] = {"int4": 4, "int8": 8, "w8a8": 8, "mxfp4": 4}


@dataclass(frozen=True)
class Kernels:
    name: Literal["native", "torch", "triton"]  # what they are written in
    number_format: str
    quant: Quant  # of most linear weights
    quantize: Quantize  # what makes them so while they are loaded
    make_ops: Callable[[], Ops]


def choose_kernels(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    if config.latent is not None and settings.kv_dtype != "auto":
        message = f"kv_dtype is {settings.kv_dtype}, but what latent attention (MLA) caches stays as it is computed"
        raise ConfigError(f"{message}; use auto", param="kv_dtype")
    return _on_gpu(config, settings, device) if device.type == "cuda" else _on_cpu(config, settings, device)


def _on_gpu(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    dtype = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    has_triton = _has_triton()
    obstacle = fp8_obstacle(device, has_triton=has_triton)
    kv_dtype = resolve_kv_dtype(settings.kv_dtype, dtype, obstacle, int8_kv_obstacle(device))
    if dtype is not torch.bfloat16:
        obstacle = obstacle or f"FP8 products give bfloat16, and dtype is {name(dtype)}"
    quant = resolve_quant(settings.quant, config.quantization, obstacle)
    if quant == "mxfp4" and (not has_triton or dtype is torch.float32):
        _tell_widened(config, dtype, "there are no kernels" if not has_triton else "its kernels are for 16 bits")
        quant = "none"
    if not has_triton:
        return Kernels("torch", name(dtype), quant, _quantizer(settings, quant), partial(ReferenceOps, device, dtype))
    make_ops = partial(_triton_ops, device, dtype, kv_dtype)
    return Kernels("triton", name(dtype), quant, _quantizer(settings, quant), make_ops)


def _quantizer(settings: EngineSettings, quant: Quant) -> Quantize:
    return as_stored if _comes_as_stored(settings) and quant != "none" else partial(to_quant, quant)


def _comes_as_stored(settings: EngineSettings) -> bool:
    """Whether each weight stays as it is stored: a file may mix formats. Random weights are in none yet."""
    return settings.quant == "auto" and settings.load != "dummy"


def _on_cpu(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    obstacle = fp8_obstacle(device, has_triton=False)
    quant = resolve_quant(settings.quant, config.quantization, obstacle)
    kv_dtype = resolve_kv_dtype(settings.kv_dtype, torch.float32, f"{obstacle}; use int8", int8_kv_obstacle(device))
    if settings.dtype == "float16":
        raise ConfigError("float16 is for GPUs; on a CPU use bfloat16 or float32", param="dtype")
    threads = settings.threads or usable_cores()
    chosen = _cpu_format(settings, quant, threads)
    if chosen.fallback_reason is not None:
        log.warning("no native CPU kernels: the model runs on torch, several times slower: %s", chosen.fallback_reason)
    if quant == "mxfp4" and 4 not in chosen.keeps:
        _tell_widened(config, getattr(torch, chosen.dtype), "there are no kernels for it, or float32 was asked for")
        quant = "none"
    if quant != "none" and _BITS[quant] not in chosen.keeps:
        log.info("the model's %s weights are widened to %s: as they are, nothing would be faster", quant, chosen.dtype)
        quant = "none"
    # The kernels have threads of their own; two pools would fight for the cores.
    torch.set_num_threads(1 if chosen.kernels == "native" else threads)
    written_in: Literal["native", "torch"] = "native" if chosen.kernels == "native" else "torch"
    # The operations widen what comes as it is stored and is not kept.
    quantize: Quantize = as_stored if _comes_as_stored(settings) else partial(to_quant, quant)
    make_ops = partial(chosen.ops, threads, None if settings.kv_dtype == "auto" else kv_dtype)
    return Kernels(written_in, chosen.arithmetic, quant, quantize, make_ops)


def _tell_widened(config: ModelConfig, dtype: torch.dtype, why: str) -> None:
    """They are most of the model: it may no longer fit, and its operator should know why."""
    now, then = (config.num_expert_parameters * bits / 8e9 for bits in (8 * dtype.itemsize, MXFP4_BITS))
    told = "the model's experts are widened from MXFP4 to %s, which takes %.1f GB instead of %.1f: %s"
    log.warning(told, name(dtype), now, then, why)


def _cpu_format(settings: EngineSettings, quant: Quant, threads: int) -> Format:
    """Weights as a file has them are kept small where that is faster; those that were asked for, in any case, and
    experts in MXFP4 wherever there are kernels: widened, a model is several times as large."""
    assert settings.dtype != "float16"
    is_wish = settings.quant in _BITS
    if quant == "mxfp4" and settings.dtype != "float32":
        with suppress(KernelsUnavailable):
            return choose_format(settings.dtype, threads, keep_low_bit=True, keep=frozenset({_BITS[quant]}))
    try:
        return choose_format(
            settings.dtype,
            threads,
            keep_low_bit=settings.quant != "none",
            keep=frozenset({_BITS[quant]}) if is_wish else frozenset(),
        )
    except KernelsUnavailable as reason:
        raise ConfigError(f"quant is {quant}, but {reason}", param="quant") from None


def _has_triton() -> bool:
    # Compiled kernels are kept where penstock keeps everything. Triton reads this when it is imported.
    os.environ.setdefault("TRITON_CACHE_DIR", str(penstock_home() / "triton"))
    try:
        import penstock.model.ops.triton  # noqa: F401
    except ModuleNotFoundError as error:
        log.warning("no GPU kernels (%s); running on torch, which is slower", error)
        return False
    return True


def _triton_ops(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Ops:
    from penstock.model.ops.triton import TritonOps

    return TritonOps(device, dtype, kv_dtype=kv_dtype)

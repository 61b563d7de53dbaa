"""Which kernels a model runs on, and in which number formats. Whatever needs Triton is imported here, and late."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.hub.home import penstock_home
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops import KVShape, LayerKV, Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.formats import Format, choose_format
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.weights import Quantize, Site
from penstock.quant import Quant, as_stored, to_quant
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover, HostCopies, PlainCopies
from penstock.runner.precision import fp8_obstacle, int8_kv_obstacle, name, resolve_kv_dtype, resolve_quant
from penstock.runner.profile import Limits, adapted, decode_step, largest_step, rows_step
from penstock.runner.runner import ModelRunner
from penstock.sched.plan import Runner

if TYPE_CHECKING:
    from penstock.runner.cuda_runner import CudaRunner

log = logging.getLogger("penstock.runner")

_BITS: dict[Quant, int] = {"int4": 4, "int8": 8, "w8a8": 8}
_SMALL_VOCABULARY = 1024  # of the model that kernels are compiled with: a head of full size would take gigabytes


@dataclass(frozen=True)
class Kernels:
    name: Literal["native", "torch", "triton"]  # what they are written in
    number_format: str
    quant: Quant  # of most linear weights
    quantize: Quantize  # what makes them so while they are loaded
    make_ops: Callable[[], Ops]


def choose_kernels(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    return _on_gpu(config, settings, device) if device.type == "cuda" else _on_cpu(config, settings, device)


def _on_gpu(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    dtype = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    has_triton = _has_triton()
    obstacle = fp8_obstacle(device, has_triton=has_triton)
    kv_dtype = resolve_kv_dtype(settings.kv_dtype, dtype, obstacle, int8_kv_obstacle(device))
    if dtype is not torch.bfloat16:
        obstacle = obstacle or f"FP8 products give bfloat16, and dtype is {name(dtype)}"
    quant = resolve_quant(settings.quant, config.quantization, obstacle)
    if not has_triton:
        return Kernels("torch", name(dtype), quant, _quantizer(settings, quant), partial(ReferenceOps, device, dtype))
    make_ops = partial(_triton_ops, device, dtype, kv_dtype)
    return Kernels("triton", name(dtype), quant, _quantizer(settings, quant), make_ops)


def _quantizer(settings: EngineSettings, quant: Quant) -> Quantize:
    return as_stored if _comes_as_stored(settings) and quant != "none" else partial(to_quant, quant)


def _comes_as_stored(settings: EngineSettings) -> bool:
    """Without a wish, each weight stays as it is stored: a file may mix formats. Random weights are in none yet."""
    return settings.quant == "auto" and settings.load != "dummy"


def _on_cpu(config: ModelConfig, settings: EngineSettings, device: torch.device) -> Kernels:
    obstacle = fp8_obstacle(device, has_triton=False)
    quant = resolve_quant(settings.quant, config.quantization, obstacle)
    kv_dtype = resolve_kv_dtype(settings.kv_dtype, torch.float32, f"{obstacle}; use int8", int8_kv_obstacle(device))
    if settings.dtype == "float16":
        raise ConfigError("float16 is for GPUs; on a CPU use bfloat16 or float32", param="dtype")
    threads = settings.threads or len(os.sched_getaffinity(0))
    chosen = _cpu_format(settings, quant, threads)
    if chosen.fallback_reason is not None:
        log.warning("no native kernels (%s); running on torch, which is slower", chosen.fallback_reason)
    if quant != "none" and _BITS[quant] not in chosen.keeps:
        log.info("the model's %s weights are widened to %s: as they are, nothing would be faster", quant, chosen.dtype)
        quant = "none"
    # The kernels have threads of their own; two pools would fight for the cores.
    torch.set_num_threads(1 if chosen.kernels == "native" else threads)
    written_in: Literal["native", "torch"] = "native" if chosen.kernels == "native" else "torch"
    # What comes as it is stored and is not kept, the operations widen.
    quantize: Quantize = as_stored if _comes_as_stored(settings) else partial(to_quant, quant)
    make_ops = partial(chosen.ops, threads, None if settings.kv_dtype == "auto" else kv_dtype)
    return Kernels(written_in, chosen.arithmetic, quant, quantize, make_ops)


def _cpu_format(settings: EngineSettings, quant: Quant, threads: int) -> Format:
    """Weights as a file has them are kept small where that is faster; those that were asked for, in any case."""
    assert settings.dtype != "float16"
    is_wish = settings.quant in _BITS
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


def make_host_copies(kernels: Kernels, ops: Ops, kv: list[LayerKV], num_blocks: int, staging_blocks: int) -> HostCopies:
    """`staging_blocks`: of device memory, for blocks on their way; only a GPU needs some."""
    if kernels.name != "triton":
        return PlainCopies(ops, kv, num_blocks)
    from penstock.runner.cuda_moving import CudaCopies

    return CudaCopies(kv, num_blocks, staging_blocks)


def make_runner(
    kernels: Kernels,
    model: CausalLM,
    ops: Ops,
    kv: list[LayerKV],
    limits: Limits,
    adapters: RunnerAdapters | None = None,
    mover: BlockMover | None = None,
) -> Runner:
    """A GPU's has captured its graphs and done the largest step: it has taken all the memory it will ever need."""
    if kernels.name == "triton":
        captured = _triton_runner(model, ops, kv, limits, adapters, mover)
        captured.capture()
        captured.submit(largest_step(limits)).result()
        if adapters is not None:
            captured.submit(adapted(largest_step(limits))).result()
        if limits.most_rows:
            captured.submit(rows_step(limits)).result()
        return captured
    runner = ModelRunner(model, ops, kv, adapters, mover)
    if ops.device.type == "cuda":
        runner.submit(largest_step(limits))
    return runner


def _triton_runner(
    model: CausalLM,
    ops: Ops,
    kv: list[LayerKV],
    limits: Limits,
    adapters: RunnerAdapters | None = None,
    mover: BlockMover | None = None,
) -> CudaRunner:
    from penstock.runner.cuda_runner import CudaRunner

    table_width = -(-limits.max_model_len // limits.block_size)
    sizes = {
        "max_num_seqs": limits.max_num_seqs,
        "chunk_tokens": limits.chunk_tokens,
        "table_width": table_width,
        "most_rows": limits.most_rows,
        "num_ahead": limits.num_ahead,
    }
    return CudaRunner(model, ops, kv, mover=mover, adapters=adapters, **sizes)


@contextmanager
def compiling_ahead(kernels: Kernels, config: ModelConfig, limits: Limits, *, adapts: bool = False) -> Iterator[None]:
    """Meanwhile Triton compiles, in a thread: a new machine waits for its disk and for the compiler at once."""
    if kernels.name != "triton":
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        compiled = pool.submit(_compile, kernels, config, limits, adapts)
        yield
        compiled.result()


def _compile(kernels: Kernels, config: ModelConfig, limits: Limits, adapts: bool) -> None:
    """Steps of every kind on one layer of the model's shape. No graphs: capturing forbids all others to allocate."""
    ops = kernels.make_ops()
    experts = config.experts and replace(config.experts, count=config.experts.per_token)
    single = replace(config, num_layers=1, windows=config.windows[:1], vocab_size=_SMALL_VOCABULARY, experts=experts)
    shape = KVShape(1, 1, limits.block_size, config.num_kv_heads, config.head_dim)
    sites: list[Site] = []
    model = load_model(RandomCheckpoint(single), ops, quantize=partial(to_quant, kernels.quant), sites=sites)
    adapters = None
    if adapts:
        model = single_slot = with_adapters(model, sites, ops, 1, max_rank=1)
        adapters = RunnerAdapters(single_slot.bank)
    runner = _triton_runner(model, ops, ops.allocate_kv(shape), limits, adapters)
    few = min(16, limits.max_num_seqs)
    with_drafts = [rows_step(limits)] if limits.most_rows else []
    for step in (decode_step(1, limits), decode_step(few, limits), largest_step(limits), *with_drafts):
        runner.submit(step).result()
        if adapts:
            runner.submit(adapted(step)).result()

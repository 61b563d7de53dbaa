"""Memory that a model will need on the device which it shares with others, from its files and its settings.

It is an estimate, made before anything is loaded: `weights_gib` and `kv_floor_gib` of a model take its place.
"""

from __future__ import annotations

import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from penstock.capacity.formats import BYTES, Formats
from penstock.capacity.memory import RESERVED_BYTES, memory_in
from penstock.capacity.model_bytes import ModelBytes
from penstock.core.context import longest_context
from penstock.core.errors import ConfigError
from penstock.core.host_memory import free_host_bytes
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings, Settings
from penstock.fleet.residency.memory_plan import ModelNeeds
from penstock.fleet.residency.settings import ModelEntry
from penstock.fleet.residency.shared_device import FitEngine, fit_cpu, fit_gpu
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.resolve import ModelFiles, resolve
from penstock.observe.gpu.nvml import open_nvml
from penstock.runner.limits import DEFAULTS, resolve_image_tokens
from penstock.tensors.repository import ModelDirectory

_GIB = 1 << 30
_CPU_SHARE, _GPU_SHARE = 0.8, 0.9
_CPU_PROCESS_BYTES = 384 << 20  # an engine and its server, without a model
_TENSOR_PROCESS_BYTES = 256 << 20  # a server with ONNX Runtime, without a model
_GPU_PARKED_BYTES = 1 << 30  # the driver's context of a parked engine, and its kernels
_FLOOR_TOKENS = 4096
_CPU_TOKENS = 16_384  # that a CPU's cache has room for at most, or a whole context
_CPU_STEP, _GPU_STEP = (512, 64), (8192, 256)  # tokens and sequences of a step, as an engine has them by itself
_NVIDIA_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the latter: of WSL
_SMI_S = 30.0
_WEIGHTS = (".safetensors", ".gguf")


class Device(NamedTuple):
    """The one that the models share."""

    name: str
    for_models_bytes: int
    is_gpu: bool
    total_bytes: int

    @property
    def fit(self) -> FitEngine:
        return partial(fit_gpu, self.total_bytes) if self.is_gpu else fit_cpu


def shared_device(engine: EngineSettings, memory_gib: float | None) -> Device:
    """The first GPU that this process may use, or this machine. Raises ConfigError."""
    found = None if engine.device == "cpu" else _first_gpu()
    if found is None and engine.device == "cuda":
        raise ConfigError("there is no GPU that NVML can see", param="engine.device")
    name, total_bytes, share = (*found, _GPU_SHARE) if found is not None else ("cpu", free_host_bytes(), _CPU_SHARE)
    for_models_bytes = int(share * total_bytes) if memory_gib is None else int(memory_gib * _GIB)
    if for_models_bytes > total_bytes:
        what = "has" if found is not None else "has free"
        message = f"memory_gib is {memory_gib:g}, and this device {what} {total_bytes / _GIB:.1f} GiB"
        raise ConfigError(message, param="memory_gib")
    return Device(name, for_models_bytes, found is not None, total_bytes)


def _first_gpu() -> tuple[str, int] | None:
    if not any(driver.exists() for driver in _NVIDIA_DRIVERS):
        return None
    source = open_nvml()
    if source is None:
        return _told_by_nvidia_smi()
    try:
        for reading in source.read():
            if reading.memory_total_bytes:
                return reading.name or "GPU", reading.memory_total_bytes
    finally:
        source.close()
    return None


def _told_by_nvidia_smi() -> tuple[str, int]:
    """Name and memory of the first GPU, for an installation without NVML's package. Raises ConfigError."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        first = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout.splitlines()[
            0
        ]
        name, _, mib = first.rpartition(",")
        return name.strip(), int(mib) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        message = "this machine has a GPU whose memory nobody tells: pip install 'penstock[gpu]', or set device: cpu"
        raise ConfigError(message, param="engine.device") from None


def needs_of(name: str, entry: ModelEntry, settings: Settings, files: ModelFiles, device: Device) -> ModelNeeds:
    engine = settings.engine
    for each in ("tp", "pp", "sp", "nnodes"):
        if (getattr(engine, each) or 1) > 1:
            raise ConfigError("models that share one device have one rank each", param=f"engine.{each}")
    formats = _formats(engine, device)
    model = ModelBytes(files.config, formats)
    models = [(model, files)]
    if engine.draft is not None:
        drafting = resolve(engine.draft)
        models.append((ModelBytes(drafting.config, formats), drafting))
    weight_bytes = sum(_weights(each, engine, of) for each, of in models)
    if entry.weights_gib is not None:
        weight_bytes = int(entry.weights_gib * _GIB)
    usual = _GPU_STEP if device.is_gpu else _CPU_STEP
    chunk_tokens, max_num_seqs = engine.chunk_tokens or usual[0], engine.max_num_seqs or usual[1]
    step = memory_in(0, files.config, formats=formats, chunk_tokens=chunk_tokens, max_num_seqs=max_num_seqs)
    step_bytes = step.step_bytes
    if not device.is_gpu:
        step_bytes += _CPU_PROCESS_BYTES - RESERVED_BYTES
    image_bytes = _image_bytes(files.config, engine, formats, "cuda" if device.is_gpu else "cpu")
    fixed_bytes = weight_bytes + step_bytes + step.state_bytes + image_bytes
    context = longest_context(engine, files.config)
    token_bytes = 0 if isinstance(files, EncoderCheckpoint) else sum(each.kv_bytes_per_token for each, _ in models)
    floor_bytes, most_bytes = _kv_bytes(token_bytes, entry, context, device)
    parked_bytes = min(fixed_bytes, _GPU_PARKED_BYTES) if device.is_gpu else fixed_bytes
    return ModelNeeds(name, fixed_bytes, floor_bytes, most_bytes, entry.kv_share, parked_bytes)


def _image_bytes(config: ModelConfig, engine: EngineSettings, formats: Formats, device_type: str) -> int:
    """Embeddings of images that are kept, and what the encoder works in at the largest image; a CPU has both in
    float32."""
    vision, tokens = config.vision, resolve_image_tokens(config, engine)
    if vision is None or not tokens:
        return 0
    at_once = tokens
    if vision.family == "idefics3":  # whose images are tiles
        at_once = min(tokens, DEFAULTS[device_type].step_image_tokens)
    num_patches = at_once * vision.merge_size**2
    worked = num_patches * (4 * vision.hidden_size + 2 * vision.intermediate_size + vision.patch_values)
    numbers = tokens * vision.levels * config.hidden_size + worked
    return int(numbers * BYTES[formats.dtype if device_type == "cuda" else "float32"])


def tensor_needs(
    name: str, entry: ModelEntry, engine: EngineSettings, directory: ModelDirectory, device: Device
) -> ModelNeeds:
    """Memory of a model that takes tensors. ONNX Runtime holds the file's weights twice, as read and as its kernels
    need them, and each instance has its own."""
    computes_here = not device.is_gpu or (engine.device != "cpu" and _runs_on_gpu(directory))
    if not computes_here:
        return ModelNeeds(name, 0, 0, 0)
    weight_bytes = 2 * len(directory.settings.instances) * sum(map(_onnx_bytes, directory.versions.values()))
    if entry.weights_gib is not None:
        weight_bytes = int(entry.weights_gib * _GIB)
    return ModelNeeds(name, weight_bytes + (_GPU_PARKED_BYTES if device.is_gpu else _TENSOR_PROCESS_BYTES), 0, 0)


def _onnx_bytes(file: Path) -> int:
    """Bytes of an ONNX file and of the files of its weights, whose names begin with its name."""
    return sum(one.stat().st_size for one in file.parent.iterdir() if one.name.startswith(file.name))


def _runs_on_gpu(directory: ModelDirectory) -> bool:
    kinds = {group.kind for group in directory.settings.instances}
    return "KIND_GPU" in kinds or ("KIND_AUTO" in kinds and bool(_installed("onnxruntime-gpu")))


def _installed(distribution: str) -> str:
    """Its version; empty: it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _kv_bytes(token_bytes: int, entry: ModelEntry, context: int, device: Device) -> tuple[int, int]:
    """The floor, and the most that it could use. `token_bytes`: 0: it has no KV cache."""
    if not token_bytes:
        return 0, 0
    floor_bytes = min(_FLOOR_TOKENS, context) * token_bytes
    if entry.kv_floor_gib is not None:
        floor_bytes = int(entry.kv_floor_gib * _GIB)
    most_bytes = device.for_models_bytes if device.is_gpu else max(_CPU_TOKENS, context) * token_bytes
    return floor_bytes, max(floor_bytes, most_bytes)


def _formats(engine: EngineSettings, device: Device) -> Formats:
    dtype = "bfloat16" if engine.dtype == "auto" else engine.dtype
    weights = dtype if engine.quant in ("auto", "none") else engine.quant
    return Formats(weights, dtype if engine.kv_dtype == "auto" else engine.kv_dtype, dtype)


def _weights(model: ModelBytes, engine: EngineSettings, files: ModelFiles) -> int:
    """Returns the bytes of weights as the files have them, unless they are to be made otherwise."""
    stored_bytes = sum(_sizes(files.path)) if engine.load != "dummy" else 0
    vision = model.config.vision
    encoder = 0 if vision is None else vision.num_parameters(model.config.hidden_size)
    made_bytes = model.stored_bytes + int(BYTES[model.formats.dtype] * encoder)
    if not stored_bytes or engine.quant not in ("auto", "none"):
        return made_bytes
    return stored_bytes if engine.quant == "auto" else max(stored_bytes, made_bytes)


def _sizes(path: Path) -> list[int]:
    files = [path] if path.is_file() else [one for one in path.iterdir() if one.suffix in _WEIGHTS]
    return [one.stat().st_size for one in files]

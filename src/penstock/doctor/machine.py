"""Checks of the machine: Python, devices, the compiler, memory and disk, open files, and a model's files. They change
nothing and fetch nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from penstock import __version__
from penstock.capacity.formats import Formats
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.smallest import choice_of, needs_of
from penstock.core.devices import VisibleGpus
from penstock.core.errors import PenstockError
from penstock.core.model_config import ModelConfig, StoredGroups
from penstock.core.settings import EngineSettings
from penstock.doctor.findings import Finding, fail, ok, warn
from penstock.hub.home import penstock_home
from penstock.observe.gpu.topology import visible_gpus

_GIB = 1 << 30
_MIN_FILES, _ENOUGH_FILES = 1024, 8192  # a gateway has two for each stream
_LITTLE_DISK, _ENOUGH_DISK = _GIB, 10 * _GIB


def python() -> Iterator[Finding]:
    name = f"{platform.python_version()}, penstock {__version__}, {platform.system()} {platform.machine()}"
    yield ok("python", name)  # an older one could not have come so far


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"a process may have {soft:,} files and connections open (at most {hard:,})"
    hint = f"ulimit -n {min(max(hard, _ENOUGH_FILES), 65536)}, or LimitNOFILE= in the unit: a stream takes two"
    if soft < _MIN_FILES:
        yield fail("open files", says, hint)
    elif soft < _ENOUGH_FILES:
        yield warn("open files", says, hint)
    else:
        yield ok("open files", says)


def disk() -> Iterator[Finding]:
    home = penstock_home()
    there = home
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    says = f"{free / _GIB:.1f} GiB free for {home}"
    hint = "set PENSTOCK_HOME to a place with more: models, decisions and the store are kept there"
    if not _is_writable(there):
        yield fail("disk", f"{there} cannot be written", "set PENSTOCK_HOME, or change the owner")
    elif free < _LITTLE_DISK:
        yield fail("disk", says, hint)
    elif free < _ENOUGH_DISK:
        yield warn("disk", says, hint)
    else:
        yield ok("disk", says)


def device(settings: EngineSettings) -> Iterator[Finding]:
    """Yields where a model would run."""
    if find_spec("torch") is None:
        yield fail("device", "torch is not installed: no model can be served", "pip install 'penstock[engine]'")
        return
    import torch

    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        driver = "the driver's library is there" if _has_driver() else "there is no NVIDIA driver"
        yield fail(
            "device", f"no GPU, though engine.device is cuda; {driver}", "see nvidia-smi; torch must be a CUDA build"
        )
        return
    if has_gpu and settings.device != "cpu":
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            what = f"{torch.cuda.get_device_name(index)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
            yield ok("device", f"cuda:{index} {what}; torch {torch.__version__}")
        if torch.cuda.device_count() > 1:
            yield from links(visible_gpus(torch.cuda))
        return
    if _has_driver() and settings.device == "auto":
        yield warn("device", "there is an NVIDIA driver, but torch sees no GPU", "install a CUDA build of torch")
    yield ok("device", f"cpu, {torch.get_num_threads()} threads; torch {torch.__version__}")
    yield from _compiler()


def links(visible: VisibleGpus) -> Iterator[Finding]:
    """The link between several GPUs: ranks of a model sum over it, twice a layer."""
    count, joined = len(visible.gpus), visible.num_nvlinked
    if joined is None:
        yield ok("links", f"how the {count} GPUs are joined is not known here: pip install 'penstock[gpu]' tells")
    elif joined == count:
        yield ok("links", f"all {count} GPUs are joined by NVLink")
    else:
        some = (
            f"the first {joined} GPUs are joined by NVLink" if joined > 1 else "no GPU is joined to the next by NVLink"
        )
        yield ok("links", f"{some}, the others of {count} by PCIe: more ranks wait longer for each other")


def _compiler() -> Iterator[Finding]:
    from penstock.model.ops.build import KernelsUnavailable, find_compiler

    try:
        yield ok("compiler", " ".join(find_compiler()))
    except KernelsUnavailable as error:
        yield warn("compiler", "none: the CPU kernels cannot be built, and models run several times slower", str(error))


def model(spec: str, settings: EngineSettings) -> Iterator[Finding]:
    """Its files, as they are on this machine, and whether it fits."""
    from penstock.hub.encoder import EncoderCheckpoint
    from penstock.hub.groups import stored_groups
    from penstock.hub.resolve import resolve
    from penstock.hub.sources import cached

    try:
        found = cached(spec)
        if found is None:
            yield warn("model", f"{spec} is not on this machine yet", f"penstock pull {spec}, or the first start will")
            return
        checkpoint = resolve(spec)
        checkpoint.tokenizer_source  # noqa: B018 (raises where it is missing)
    except PenstockError as error:
        yield fail("model", error.message)
        return
    size = sum(file.stat().st_size for file in _files(found.path))
    config = checkpoint.config
    yield ok("model", f"{spec}: {_parameters(config)}, {size / _GIB:.2f} GiB, complete, in {found.path}")
    visible = _visible(settings)
    if not isinstance(checkpoint, EncoderCheckpoint) and (
        len(visible.gpus) > 1 or (settings.tp or 1) * (settings.pp or 1) * (settings.nnodes or 1) > 1
    ):
        yield from parallelism(config, settings, visible, stored_groups(checkpoint))
        return
    kv = "bfloat16" if settings.kv_dtype == "auto" else settings.kv_dtype
    yield from _memory(size, ModelBytes(config, Formats(kv=kv)).kv_bytes_per_token, settings)


def parallelism(
    config: ModelConfig, settings: EngineSettings, visible: VisibleGpus, groups: StoredGroups | None = None
) -> Iterator[Finding]:
    """Yields over how many ranks it would be served, as `penstock serve` would choose."""
    try:
        needs = needs_of(settings, config, has_fp8=all(gpu.has_fp8 for gpu in visible.gpus), groups=groups)
        choice = choice_of(settings, needs, visible)
    except PenstockError as error:
        yield fail("parallelism", error.message)
        return
    if choice.lines:
        yield ok("parallelism", "; ".join(choice.lines))
        return
    assert choice.memory is not None, "there are GPUs, or several ranks"
    room = f"{choice.memory.weight_bytes / _GIB:.1f} GiB of weights, then room for {choice.memory.kv_tokens:,} tokens"
    yield ok("parallelism", f"one GPU is enough: {room} of KV cache")


def _visible(settings: EngineSettings) -> VisibleGpus:
    if settings.device == "cpu" or find_spec("torch") is None:
        return VisibleGpus()
    import torch

    return visible_gpus(torch.cuda)


def _parameters(config: ModelConfig) -> str:
    found = f"{config.num_parameters / 1e6:,.0f} M parameters"
    return found + (f" ({config.num_active_parameters / 1e6:,.0f} M active)" if config.experts else "")


def _memory(weight_bytes: int, token_bytes: int, settings: EngineSettings) -> Iterator[Finding]:
    if find_spec("torch") is None:
        return
    import torch

    from penstock.runner.memory import free_bytes

    kind = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
    free = free_bytes(torch.device(kind))
    left = (free - weight_bytes) // token_bytes
    says = f"{free / _GIB:.1f} GiB free on {kind}; weights as stored {weight_bytes / _GIB:.1f}"
    if left <= 0:
        yield fail("memory", says, "a smaller model, more memory, or a smaller number format (quant)")
    elif left < 4096:
        yield warn("memory", f"{says}, room for {left:,} tokens", "few requests fit: a smaller model or format")
    else:
        yield ok("memory", f"{says}, then room for about {left:,} tokens of KV cache")


def packages(extras: dict[str, str]) -> Iterator[Finding]:
    """`extras`: modules that the configuration needs, and what brings them."""
    for module, extra in extras.items():
        if find_spec(module.partition(".")[0]) is None or not _can_find(module):
            yield fail("packages", f"{module} is needed and not installed", f"pip install '{extra}'")
        else:
            yield ok("packages", f"{module} {_version(module)}".strip())


def _can_find(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(module: str) -> str:
    try:
        return version(module.replace(".", "-"))
    except PackageNotFoundError:
        return ""


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.iterdir() if file.suffix == ".safetensors"]


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _is_writable(directory: Path) -> bool:
    return os.access(directory, os.W_OK | os.X_OK)

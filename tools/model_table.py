"""The page of models in docs/reference: families as the code reads them, and what well-known shapes need in memory."""

from __future__ import annotations

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import Gpu, find_gpu, hardware
from penstock.capacity.memory import memory_of
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.shapes import SHAPES
from penstock.core.errors import PenstockError
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.hub.encoder import FAMILIES as ENCODERS
from penstock.hub.families import FAMILY_FILES, FamilyFiles

GPU = "h100"
CONTEXT_TOKENS = 32_768  # of KV cache that a deployment must have at the least
_WEIGHTS = ("bfloat16", "fp8", "int4", "mxfp4")
_AS_LLAMA = ("mistral", "mixtral")  # in GGUF
_RANKS = (1, 2, 4, 8)


def models_page() -> str:
    gpu = find_gpu(hardware(), GPU)
    lines = [
        "# Models\n",
        "Families that are read and run, and what well-known sizes of them need. [How models are named and "
        "fetched](../models.md); for your own traffic and GPUs ask [`penstock plan`](../plan.md).\n",
        "## Families\n",
        "| family | class in config.json | name in GGUF | windows | experts |",
        "|---|---|---|---|---|",
        *(_family(name, files) for name, files in FAMILY_FILES.items()),
        *(f"| {name} | encoders: vectors, no texts | | | |" for name in ENCODERS),
        "\n## Memory\n",
        "Weights in GB of 10⁹ bytes, the embedding and the head in bf16, of a model that comes in mxfp4 all but the "
        "experts; KV cache in KiB for each token, as if no layer had a window, and in MB the recurrent state of each "
        f"running sequence. The last columns: how many GPUs of {gpu.memory_gib:.0f} GiB ({gpu.name}) hold weights, "
        "recurrent states of 256 sequences and 32 snapshots, what a step works in, and a KV cache of "
        f"{CONTEXT_TOKENS:,} tokens in bf16, with tensor parallelism.\n",
        "| shape | family | parameters | active | bf16 | fp8 | int4 | mxfp4 | KV, bf16 | KV, fp8 | state | GPUs, bf16 "
        "| fp8 | int4 | mxfp4 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_shape(name, config, gpu) for name, config in SHAPES.items() if name != "tiny"),
    ]
    return "\n".join(lines) + "\n"


def _family(name: str, files: FamilyFiles) -> str:
    gguf = f"`{files.gguf_name}`" if files.gguf_name else "as `llama`" if name in _AS_LLAMA else "not read"
    windows = "" if files.windows in ("never", "refused") else files.windows
    return f"| {name} | `{files.hf_class}` | {gguf} | {windows} | {'yes' if files.experts is not None else ''} |"


def _shape(name: str, config: ModelConfig, gpu: Gpu) -> str:
    sizes = [_size(config, weights) for weights in _WEIGHTS]
    formats = ("bfloat16",) if config.latent is not None else ("bfloat16", "fp8")  # latents are not made small
    kv = [f"{ModelBytes(config, Formats(kv=kv)).kv_bytes_per_token / 1024:,.0f}" for kv in formats]
    kv += [""] * (2 - len(kv))
    active = "" if config.experts is None else _billions(config.num_active_parameters)
    state = f"{config.state_bytes / 1e6:,.1f}" if config.state_bytes else ""
    counts = [_num_gpus(config, gpu, weights) for weights in _WEIGHTS]
    cells = [f"`{name}`", config.architecture, _billions(config.num_parameters), active, *sizes, *kv, state, *counts]
    return f"| {' | '.join(cells)} |"


def _comes_in(config: ModelConfig, weights: str) -> bool:
    """Whether the model comes in this format or can be made so while it is loaded."""
    return weights != "mxfp4" or config.quantization == weights


def _size(config: ModelConfig, weights: str) -> str:
    if not _comes_in(config, weights):
        return ""
    return f"{ModelBytes(config, Formats(weights)).stored_bytes / 1e9:,.1f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.1f} B"


def _num_gpus(config: ModelConfig, gpu: Gpu, weights: str) -> str:
    if not _comes_in(config, weights):
        return ""
    for ranks in _RANKS:
        try:
            memory = memory_of(config, gpu, formats=Formats(weights), parallelism=Parallelism(tp=ranks))
        except PenstockError:
            continue
        if memory.kv_tokens >= CONTEXT_TOKENS:
            return str(ranks)
    return f"more than {_RANKS[-1]}"

"""Models that take images, in Hugging Face's form: what config.json says of the encoder, and how its tensors are named.

Tensors of the decoder have the names that a decoder alone has; those of the encoder begin with `vision.`, and what
brings its results to the decoder's size with `connector.`, whatever the files call them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import VisionConfig

Json = Mapping[str, Any]

# Model types with a decoder that can be served by itself: what is not understood of them takes no images.
WITH_IMAGES = (
    "gemma3",
    "idefics3",
    "llama4",
    "mistral3",
    "smolvlm",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
_OUTER = ("eos_token_id", "bos_token_id", "quantization_config")
# The decoder's config by model type where the files say nothing, and the frequencies of M-RoPE likewise.
_QWEN_TEXT: dict[str, Json] = {
    "qwen2_5_vl": {"model_type": "qwen2", "rope_theta": 1_000_000.0},
    "qwen3_vl": {"model_type": "qwen3", "rope_theta": 500_000.0, "head_dim": 128},
    "qwen3_5": {"model_type": "qwen3_5_text"},  # text alone: its images are not read
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}
_SECTIONS = {"qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20)}

_OF_SECTIONS = ("mrope_section", "mrope_interleaved", "type", "rope_type")

ENCODER = ("vision.", "connector.")  # what its tensors are called here

# Prefixes in files, older ones and newer; "": the tensor is not read.
_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "model.vision_model.": "vision.",
    "model.connector.": "connector.",
    "visual.": "vision.",
    "model.visual.": "vision.",
    "vision_model.": "",
    "mtp.": "",  # drafts of the model's own: layers that predict several tokens
    "vision_tower.": "",
    "multi_modal_projector.": "",
    "model.vision_tower.": "",
    "model.multi_modal_projector.": "",
}


def our_name(name: str) -> str | None:
    """None: nothing that is served needs the tensor."""
    for theirs, ours in _NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs) if ours else None
    return name


def text_config(config: Json) -> Json:
    """Decoder's config of a model with images, else `config`. Older files of Qwen2.5-VL have it beside the rest."""
    kind = config.get("model_type")
    if kind not in WITH_IMAGES:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        if kind not in _QWEN_TEXT:
            return config
        inner = {key: value for key, value in config.items() if key != "vision_config"}
    outer = {key: config[key] for key in _OUTER if config.get(key)}
    if kind in _QWEN_TEXT:
        if "tie_word_embeddings" in config:
            outer["tie_word_embeddings"] = config["tie_word_embeddings"]
        plain, defaults = _without_sections(inner), _QWEN_TEXT[kind]
        return {**defaults, **inner, **outer, "model_type": defaults["model_type"], **plain}
    if kind in ("idefics3", "smolvlm"):
        # transformers ties by the outer config; files say by a head of their own that they are not tied.
        inner = {"model_type": "llama", **{key: value for key, value in inner.items() if key != "tie_word_embeddings"}}
        if config.get("tie_word_embeddings"):
            outer["tie_word_embeddings"] = True
    if kind == "llama4":
        inner = {**inner, "model_type": "llama4_text"}
    return {**inner, **outer}


def _without_sections(inner: Json) -> Json:
    """The rope's parameters as those of a decoder whose frequencies all turn with the position: text has it so."""
    plain: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = inner.get(key)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type", "default"))
            rest = {name: value for name, value in rope.items() if name not in _OF_SECTIONS}
            plain[key] = {**rest, "rope_type": "default" if kind == "mrope" else kind}
    return plain


def rope_sections(config: Json) -> tuple[int, ...]:
    """Frequencies that turn with time, row and column; (): all turn with the position."""
    kind = config.get("model_type")
    if kind not in _SECTIONS:
        return ()
    inner = config.get("text_config") or config
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section") or _SECTIONS[kind])
    if has_interleaved_sections(config) and len(sections) != 3:
        raise ValueError(f"mrope_section is {list(sections)}")
    return sections


def has_interleaved_sections(config: Json) -> bool:
    return bool(config.get("model_type") == "qwen3_vl")


def vision_config(config: Json) -> VisionConfig | None:
    """None: the model takes no images, or none that we know of. Raises what a broken config raises: KeyError and such,
    which the caller names."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    if kind in ("idefics3", "smolvlm"):
        return _checked(_idefics3(config, vision))
    if kind == "qwen2_5_vl":
        return _checked(_qwen2_5_vl(vision))
    if kind == "qwen3_vl":
        return _checked(_qwen3_vl(vision))
    return None


def _idefics3(config: Json, vision: Json) -> VisionConfig:
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ModelUnsupported(f"the activation of its image encoder is {activation}; supported: gelu_pytorch_tanh")
    return VisionConfig(
        family="idefics3",
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 3072),
        num_layers=vision.get("num_hidden_layers", 12),
        num_heads=vision.get("num_attention_heads", 16),
        patch_size=vision.get("patch_size", 32),
        merge_size=config.get("scale_factor", 2),
        image_size=vision.get("image_size", 224),
        norm_eps=vision.get("layer_norm_eps", 1e-6),
    )


def _qwen2_5_vl(vision: Json) -> VisionConfig:
    if (activation := vision.get("hidden_act", "silu")) != "silu":
        raise ModelUnsupported(f"the activation of its image encoder is {activation}; supported: silu")
    return VisionConfig(
        family="qwen2_5_vl",
        hidden_size=vision.get("hidden_size", 3584),
        intermediate_size=vision.get("intermediate_size", 3420),
        num_layers=vision.get("depth", 32),
        num_heads=vision.get("num_heads", 16),
        patch_size=vision.get("patch_size", 14),
        merge_size=vision.get("spatial_merge_size", 2),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        window_size=vision.get("window_size", 112),
        full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def _qwen3_vl(vision: Json) -> VisionConfig:
    if (activation := vision.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ModelUnsupported(f"the activation of its image encoder is {activation}; supported: gelu_pytorch_tanh")
    return VisionConfig(
        family="qwen3_vl",
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 4304),
        num_layers=vision.get("depth", 27),
        num_heads=vision.get("num_heads", 16),
        patch_size=vision.get("patch_size", 16),
        merge_size=vision.get("spatial_merge_size", 2),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        position_side=math.isqrt(vision.get("num_position_embeddings", 2304)),
        stacked_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
    )


def _checked(vision: VisionConfig) -> VisionConfig:
    """Kernels divide by these. Raises ValueError."""
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "patch_size", "merge_size")
    for name in sizes:
        if not isinstance(size := getattr(vision, name), int) or size < 1:
            raise ValueError(f"{name} of its image encoder is {size!r}, and must be a positive whole number")
    if vision.hidden_size % vision.num_heads:
        raise ValueError(f"its image encoder has {vision.num_heads} heads in {vision.hidden_size} dimensions")
    if vision.family != "idefics3" and vision.hidden_size // vision.num_heads % 4:
        raise ValueError("heads of its image encoder cannot be as small as they are")
    if vision.family == "qwen2_5_vl":
        if vision.window_size // vision.merge_size < vision.patch_size:
            raise ValueError("windows of its image encoder cannot be as small as they are")
        return vision
    if vision.family == "qwen3_vl":
        stacked = vision.stacked_layers
        if vision.position_side < 1 or len({*stacked}) != len(stacked) or not {*stacked} <= {*range(vision.num_layers)}:
            raise ValueError("positions or stacked layers of its image encoder are not as they must be")
        return vision
    side = vision.image_size // vision.patch_size
    if side < 1 or side % vision.merge_size:
        raise ValueError(f"images of {vision.image_size} pixels cannot be cut and merged by its image encoder")
    return vision

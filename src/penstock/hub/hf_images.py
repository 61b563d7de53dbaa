"""Image preprocessing of a Hugging Face directory: preprocessor_config.json, or processor_config.json of newer ones.
Missing keys have the defaults of the reference's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelUnsupported
from penstock.core.image_processor import ImageProcessorConfig
from penstock.core.model_config import VisionConfig
from penstock.hub.hf_directory import read_json

Json = Mapping[str, Any]

_HALVES = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_LANCZOS, _BICUBIC = 1, 3
_MAX_SIDE = 1 << 20  # of what a file may ask for


def image_processor(directory: Path, vision: VisionConfig | None) -> ImageProcessorConfig | None:
    """None: the model takes no images, or its directory does not say how they are made ready. Raises ModelUnsupported
    where they are to be made ready in a way that is not known here."""
    if vision is None:
        return None
    whole = read_json(directory / "processor_config.json")
    inner = whole.get("image_processor")
    said = inner if isinstance(inner, Mapping) else read_json(directory / "preprocessor_config.json")
    if not said:
        return None
    try:
        return _idefics3(said, whole, vision) if vision.family == "idefics3" else _qwen(said, vision)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelUnsupported(f"{directory}: its image processor cannot be read: {error}") from None


def _idefics3(said: Json, whole: Json, vision: VisionConfig) -> ImageProcessorConfig:
    _check_does(said, "do_resize")
    tile = int(_edge(said.get("max_image_size", {"longest_edge": 364})))
    if tile != vision.image_size:
        raise ModelUnsupported(f"tiles of {tile} pixels do not fit the encoder's images of {vision.image_size}")
    found = ImageProcessorConfig(
        family="idefics3",
        placeholder="<image>",
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        tile_size=tile,
        longest_edge=_side(_edge(said.get("size", {"longest_edge": 4 * 364}))),
        is_split=bool(said.get("do_image_splitting", True)),
        **_colours(said, _HALVES, _HALVES, _LANCZOS),
    )
    if (told := whole.get("image_seq_len", said.get("image_seq_len"))) not in (None, found.tile_tokens):
        raise ModelUnsupported(f"image_seq_len is {told}, but the encoder makes {found.tile_tokens} tokens of a tile")
    return found


def _qwen(said: Json, vision: VisionConfig) -> ImageProcessorConfig:
    _check_does(said, "do_resize")
    sizes = {"patch_size": (14, vision.patch_size), "merge_size": (2, vision.merge_size)}
    sizes["temporal_patch_size"] = (2, vision.temporal_patch_size)
    for name, (default, needed) in sizes.items():
        if said.get(name, default) != needed:
            raise ModelUnsupported(f"{name} is {said.get(name, default)}, and the encoder's is {needed}")
    size = said.get("size") or {}
    least = said.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    most = said.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    return ImageProcessorConfig(
        family="qwen_vl",
        placeholder="<|image_pad|>",
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=_positive(least),
        max_pixels=_positive(most),
        **_colours(said, _CLIP_MEAN, _CLIP_STD, _BICUBIC),
    )


def _colours(said: Json, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> dict[str, Any]:
    std = _three(said.get("image_std", std))
    if not all(std) or said.get("resample", resample) not in range(6):
        raise ValueError(f"image_std is {list(std)} and resample is {said.get('resample')}")
    return {
        "mean": _three(said.get("image_mean", mean)),
        "std": std,
        "resample": int(said.get("resample", resample)),
        "rescale": float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else None,
        "is_normalized": bool(said.get("do_normalize", True)),
    }


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = [values] * 3 if isinstance(values, int | float) else values
    return float(red), float(green), float(blue)


def _edge(size: Any) -> int:
    return int(size["longest_edge"] if isinstance(size, Mapping) else size)


def _side(value: int) -> int:
    if not 1 <= value <= _MAX_SIDE:
        raise ValueError(f"a side of {value} pixels")
    return value


def _positive(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"{value} pixels")
    return int(value)


def _check_does(said: Json, name: str) -> None:
    if not said.get(name, True):
        raise ModelUnsupported(f"{name} is false, and images cannot be taken as they come")

"""Tiny random models that take images, of every family, and the same weights as one of our checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from penstock.core.images import ImageInput, image_tokens
from penstock.hub.hf_config import model_config
from penstock.hub.hf_vision import our_name
from tests.model.tiny import SHAPE, ArrayCheckpoint

IMAGE_TOKEN = 7  # theirs
TEXT: dict[str, Any] = SHAPE | {"max_position_embeddings": 256}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 24,
    "initializer_range": 0.2,
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "out_hidden_size": TEXT["hidden_size"],
    "fullatt_block_indexes": [1],
    "initializer_range": 0.2,
}
QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
    "initializer_range": 0.2,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
QWEN3_ROPE = QWEN_ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
CONFIGS: dict[str, PreTrainedConfig] = {
    "idefics3": Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=SIGLIP, scale_factor=2, image_token_id=IMAGE_TOKEN
    ),
    "smolvlm": SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=SIGLIP,
        scale_factor=3,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=True,
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": QWEN_ROPE},
        vision_config=QWEN_VISION,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=8,
        vision_end_token_id=9,
        video_token_id=10,
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config=TEXT | {"num_hidden_layers": 3, "rope_parameters": QWEN3_ROPE},
        vision_config=QWEN3_VISION,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=8,
        vision_end_token_id=9,
        video_token_id=10,
    ),
}


def hf_vision_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name], attn_implementation="eager")
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.ndim == 1:  # norms start at one and biases at zero: make them count
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.3)
    return model


class VisionCheckpoint(ArrayCheckpoint):
    """A checkpoint over a torch model's own weights, named as our checkpoints of such models have them."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model_config(model.config.to_dict(), {}, has_head=True)
        named = ((our_name(name), tensor) for name, tensor in model.state_dict().items())
        super().__init__(config, {name: tensor.numpy() for name, tensor in named if name is not None})


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def made_image(name: str, seed: int, rows: int = 4, columns: int = 6) -> ImageInput:
    """An image of noise, that begins nowhere yet. `rows` and `columns`: of patches, where the family's may vary."""
    dice = torch.Generator().manual_seed(seed)
    if name.startswith("qwen"):
        grid, shape, num_tokens = [1, rows, columns], [rows * columns, 3 * 2 * 4 * 4], rows * columns // 4
    else:
        side = SIGLIP["image_size"]
        grid, shape = [1, 6, 6], [3, side, side]
        num_tokens = (6 // CONFIGS[name].scale_factor) ** 2
    values = torch.randn(shape, generator=dice).numpy().tobytes()
    return ImageInput(hashlib.sha256(values).hexdigest(), 0, num_tokens, grid, shape, values)


def prompt_of(*parts: Sequence[int] | ImageInput) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Text and images behind each other."""
    from msgspec.structs import replace

    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, ImageInput):
            images.append(replace(part, start=len(ids)))
            ids += image_tokens(part.digest, part.num_tokens)
        else:
            ids += part
    return ids, tuple(images)


def pixels(images: Sequence[ImageInput]) -> list[Tensor]:
    return [torch.frombuffer(bytearray(each.values), dtype=torch.float32).view(each.shape) for each in images]


@torch.inference_mode()
def vision_logits(
    theirs: PreTrainedModel, prompt: Sequence[int], images: Sequence[ImageInput], output: Sequence[int]
) -> Tensor:
    """Returns the reference's logits before each token of `output`, [output, vocabulary], in one pass over it."""
    ids = torch.tensor([[IMAGE_TOKEN if token >= 1 << 30 else token for token in [*prompt, *output]]])
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if images and theirs.config.model_type.startswith("qwen"):
        inputs["pixel_values"] = torch.cat(pixels(images))
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    elif images:
        inputs["pixel_values"] = torch.stack(pixels(images))[None]
    return theirs(**inputs).logits[0, len(prompt) - 1 : -1]

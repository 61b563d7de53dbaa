"""Small models that take images, what they are asked, and the reference that their answers are held to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.core.images import FIRST_IMAGE_TOKEN, ImageInput, image_tokens
from penstock.core.model_config import ModelConfig, VisionConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.hub.checkpoint import Checkpoint
from penstock.model.batch import ImageRows
from penstock.model.vision.loading import load_vision
from penstock.runner.images import image_parts, mrope_positions
from penstock.runner.runner import merge_size_of
from penstock.sched.plan import Slice
from tests.model.family_configs import SHAPE
from tests.model.paged import PagedSequence, make_batch
from tests.runner.clients import Answer
from tests.runner.judge import Judge

SQUARE = VisionConfig("idefics3", 64, 96, num_layers=2, num_heads=4, patch_size=4, merge_size=2, image_size=24)
WINDOWED = VisionConfig(
    "qwen2_5_vl",
    64,
    80,
    num_layers=3,
    num_heads=4,
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    window_size=16,
    full_layers=(1,),
)
STACKED = VisionConfig(
    "qwen3_vl",
    64,
    80,
    num_layers=3,
    num_heads=4,
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    position_side=7,
    stacked_layers=(0, 2),
)
CONFIGS: dict[str, ModelConfig] = {
    "idefics3": replace(SHAPE, vision=SQUARE),
    "qwen2.5-vl": replace(
        SHAPE, architecture="qwen2", attention_bias=True, vision=WINDOWED, rope_sections=(4, 6, 6), tied_embeddings=True
    ),
    "qwen3-vl": replace(
        SHAPE, architecture="qwen3", num_layers=3, vision=STACKED, rope_sections=(6, 5, 5), rope_interleaved=True
    ),
}


def noise(config: ModelConfig, source: random.Random) -> ImageInput:
    vision = config.vision
    assert vision is not None
    if vision.family == "idefics3":
        side = vision.image_size // vision.patch_size
        grid, shape = [1, side, side], [3, vision.image_size, vision.image_size]
    else:
        grid = [1, 2 * source.randint(1, 5), 2 * source.randint(1, 5)]
        shape = [grid[1] * grid[2], vision.patch_values]
    drawn = np.random.default_rng(source.randrange(1 << 30)).standard_normal(shape).astype(np.float32)
    num_tokens = grid[1] * grid[2] // vision.merge_size**2
    return ImageInput(hashlib.sha256(drawn.tobytes()).hexdigest(), 0, num_tokens, grid, shape, drawn.tobytes())


def requests(config: ModelConfig, count: int = 14) -> list[Request]:
    """Some share images and what comes before them; some have two, or none; prompts are longer than a chunk."""
    source = random.Random(11)
    images = [noise(config, source) for _ in range(5)]
    shared = source.choices(range(config.vocab_size), k=10)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9, seed=5)]
    made = []
    for number in range(count):
        ids = shared[: source.choice([0, 4, 10])]
        placed = []
        for image in source.sample(images, k=source.choice([0, 1, 1, 2])):
            placed.append(msgspec.structs.replace(image, start=len(ids)))
            ids += image_tokens(image.digest, image.num_tokens)
            ids += source.choices(range(config.vocab_size), k=source.randint(1, 5))
        ids += source.choices(range(config.vocab_size), k=source.randint(1, 6))
        kind = kinds[number % 2]
        made.append(Request(f"r{number}", ids, source.randint(4, 14), kind, images=tuple(placed)))
    return made


class SeeingJudge(Judge):
    """A judge by what the plain torch reference makes of prompts with images, in one pass."""

    def __init__(self, checkpoint: Checkpoint, *, longest: int) -> None:
        super().__init__(checkpoint, longest=longest)
        self._encoder = load_vision(checkpoint, self._ops)
        self._merge_size = merge_size_of(checkpoint.config)
        self._images: Sequence[ImageInput] = ()

    def check(self, answer: Answer) -> int:
        self._images = answer.request.images
        return super().check(answer)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        assert self._encoder is not None
        tokens = [*prompt, *output[:-1]]
        plain = [token if token < FIRST_IMAGE_TOKEN else 0 for token in tokens]
        batch = make_batch([(PagedSequence(plain, self._blocks), len(plain))], every_row=True)
        batch = replace(batch, logit_rows=batch.logit_rows[len(prompt) - 1 :])
        whole = Slice("all", 0, len(tokens), tokens, self._blocks, None, 0, images=self._images)
        if self._images:
            made = dict(zip((i.digest for i in self._images), self._encoder(self._images), strict=True))
            parts = image_parts([whole])
            rows = torch.cat([torch.arange(part.row, part.row + part.count) for part in parts])
            batch = replace(batch, images=ImageRows(rows, torch.cat([made[part.digest] for part in parts])))
        if self._merge_size:
            batch = replace(batch, mrope_positions=torch.from_numpy(mrope_positions(whole, self._merge_size)))
        with sdpa_kernel(SDPBackend.MATH):  # others may round more than float32 does
            return self._model(batch, self._kv)

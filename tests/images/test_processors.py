"""Values and sizes are those of transformers' own processors in Pillow and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from penstock.core.errors import InvalidImage
from penstock.core.image_processor import ImageProcessorConfig
from penstock.images.processors import processor_of
from tests.images.samples import noise

HALVES = (0.5, 0.5, 0.5)
SQUARE = ImageProcessorConfig(
    "idefics3", "<image>", HALVES, HALVES, patch_size=4, merge_size=2, resample=1, tile_size=24, longest_edge=72
)
PATCHES = ImageProcessorConfig(
    "qwen_vl",
    "<|image_pad|>",
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
    patch_size=4,
    merge_size=2,
    resample=3,
    min_pixels=8 * 8 * 2,
    max_pixels=8 * 8 * 30,
    temporal_patch_size=2,
)
SIZES = [(60, 40), (40, 61), (24, 24), (5, 3), (100, 100), (300, 7), (9, 130), (1, 1), (73, 72)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("theirs", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize(("longest", "splits"), [(72, True), (24, True), (72, False), (30, True)])
def test_tiles_are_those_of_the_reference(theirs: type, size: tuple[int, int], longest: int, splits: bool) -> None:
    reference = theirs(
        size={"longest_edge": longest},
        max_image_size={"longest_edge": 24},
        do_image_splitting=splits,
        return_row_col_info=True,
    )
    image = noise(*size)
    made = reference(images=[image], return_tensors="np")
    processor = processor_of(replace(SQUARE, longest_edge=longest, is_split=splits))
    layout, values = processor.layout(*size), list(processor.values(image))
    assert np.array_equal(np.stack(values), made["pixel_values"][0])
    assert [tile.shape for tile in layout.tiles] == [value.shape for value in values]
    assert all(value.dtype == np.float32 and value.flags.c_contiguous for value in values)
    rows, columns = made["rows"][0][0], made["cols"][0][0]
    written = Idefics3Processor.replace_image_token(_Named(), {"rows": made["rows"], "cols": made["cols"]}, 0)
    assert layout.text == written
    assert len(layout.tiles) == rows * columns + 1


class _Named:
    """What the reference's prompt is made of, with one token for each tile."""

    fake_image_token, global_image_tag, image_token = "<fake_token_around_image>", "<global-img>", "<image>"
    image_seq_len = 1


@pytest.mark.parametrize("size", [size for size in SIZES if size != (300, 7)] + [(8, 1600)], ids=str)
@pytest.mark.parametrize("merge_size", [1, 2])
def test_patches_are_those_of_the_reference(size: tuple[int, int], merge_size: int) -> None:
    config = replace(PATCHES, merge_size=merge_size)
    reference = Qwen2VLImageProcessorPil(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        patch_size=4,
        merge_size=merge_size,
    )
    image = noise(*size)
    made = reference(images=[image], return_tensors="np")
    processor = processor_of(config)
    (tile,), (values,) = processor.layout(*size).tiles, list(processor.values(image))
    assert np.array_equal(values, made["pixel_values"])
    assert tile.grid == tuple(made["image_grid_thw"][0])
    assert tile.shape == values.shape
    assert tile.num_tokens == reference.get_number_of_image_patches(size[1], size[0]) // merge_size**2


@pytest.mark.parametrize("size", [(201, 1), (1, 50_000)])
def test_a_strip_that_no_patches_can_be_made_of_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage, match="200"):
        processor_of(PATCHES).layout(*size)


@pytest.mark.parametrize("config", [SQUARE, PATCHES], ids=["idefics3", "qwen"])
def test_an_image_that_few_tokens_are_spent_on_has_fewer(config: ImageProcessorConfig) -> None:
    processor = processor_of(replace(config, max_pixels=1 << 24))
    layout, (values,) = processor.layout(900, 900, is_low=True), list(processor.values(noise(900, 900), is_low=True))
    assert layout.num_tokens < processor.layout(900, 900).num_tokens
    assert layout.tiles[0].shape == values.shape


def test_steps_that_are_left_out_are() -> None:
    reference = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 128, "longest_edge": 1920}, patch_size=4, do_rescale=False, do_normalize=False
    )
    image = noise(40, 30)
    processor = processor_of(replace(PATCHES, rescale=None, is_normalized=False))
    assert np.array_equal(next(processor.values(image)), reference(images=[image], return_tensors="np")["pixel_values"])

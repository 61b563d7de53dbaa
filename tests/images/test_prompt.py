from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest
from penstock.core.image_processor import ImageProcessorConfig
from penstock.core.images import are_placed, is_image_token
from penstock.images.prompt import num_placed, placed, spelled_out
from penstock.images.reading import ImageReader, ReadImage
from tests.images.samples import encoded, noise

MARK, MARK_ID = "<image>", 7
HALVES = (0.5, 0.5, 0.5)
TILES = ImageProcessorConfig(
    "idefics3", MARK, HALVES, HALVES, patch_size=4, merge_size=2, resample=1, tile_size=24, longest_edge=72
)
READER = ImageReader(TILES, max_pixels=10_000)
IMAGES = [READER.read(encoded(noise(40, 30, seed)), is_low=seed == 2) for seed in range(3)]


def ids_of(text: str) -> list[int]:
    """Of a tokenizer to which the mark is a token, and each other character."""
    parts = text.split(MARK)
    found = [1000 + ord(character) for character in parts[0]]
    for part in parts[1:]:
        found += [MARK_ID, *(1000 + ord(character) for character in part)]
    return found


@given(st.lists(st.sampled_from(IMAGES), max_size=4), st.lists(st.text("ab", max_size=3), min_size=5, max_size=5))
def test_images_are_where_the_engine_looks_for_them(images: list[ReadImage], texts: list[str]) -> None:
    text = MARK.join(texts[: len(images) + 1])
    ids = ids_of(spelled_out(text, images, MARK))
    found = placed(ids, images, MARK_ID)
    assert len(found.ids) == num_placed(len(ids), images)
    assert found.num_image_tokens == found.ids.count(MARK_ID)
    keyed = found.keyed_ids()
    assert [token if not is_image_token(token) else MARK_ID for token in keyed] == found.ids
    inputs = []
    for image, tiles in zip(images, found.tiles, strict=True):
        for one, tile in zip(READER.inputs(image), tiles, strict=True):
            assert (one.digest, one.num_tokens) == (tile.digest, tile.num_tokens)
            inputs.append(replace(one, start=tile.start))
    assert are_placed(inputs, keyed)


def test_places_and_images_must_be_as_many() -> None:
    for text in ("a", f"{MARK}{MARK}"):
        with pytest.raises(InvalidRequest, match="1 images"):
            spelled_out(text, IMAGES[:1], MARK)


def test_a_digest_is_of_the_bytes_and_of_all_that_changes_what_is_made_of_them() -> None:
    data = encoded(noise(40, 30))
    others = [
        READER.read(data, is_low=True),
        READER.read(encoded(noise(40, 30), optimize=True)),
        ImageReader(replace(TILES, resample=3), max_pixels=10_000).read(data),
        ImageReader(replace(TILES, mean=(0.4, 0.5, 0.5)), max_pixels=10_000).read(data),
    ]
    digests = [READER.read(data).digests, *(other.digests for other in others)]
    assert len({digest for each in digests for digest in each}) == sum(map(len, digests))
    assert READER.read(data).digests == digests[0]

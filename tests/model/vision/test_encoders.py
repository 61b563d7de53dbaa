"""What encoders make of images, and what tokens of images are rotated by, is what transformers says."""

from __future__ import annotations

import pytest
import torch

from penstock.runner.images import mrope_positions
from penstock.sched.plan import Slice
from tests.model.tiny_vision import CONFIGS, IMAGE_TOKEN, made_image, prompt_of
from tests.model.vision.comparing import encoded_by_theirs, pair_of

FAMILIES = pytest.mark.parametrize("name", list(CONFIGS))
QWENS = pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("qwen")])


@FAMILIES
def test_embeddings_are_those_of_transformers(name: str) -> None:
    pair = pair_of(name)
    images = pair.images()
    for ours, theirs in zip(pair.ours(images), encoded_by_theirs(pair.theirs, images), strict=True):
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@FAMILIES
def test_an_image_is_the_same_whatever_is_encoded_beside_it(name: str) -> None:
    pair = pair_of(name)
    images = pair.images()
    for image, together in zip(images, pair.ours(images), strict=True):
        torch.testing.assert_close(pair.ours([image])[0], together, rtol=1e-4, atol=1e-5)


@QWENS
@pytest.mark.parametrize("cut", [1, 5, 100])
def test_places_of_tokens_are_those_of_transformers(name: str, cut: int) -> None:
    """In slices that cut through images, one of which is at the end."""
    first, second, third = made_image(name, 1, 4, 10), made_image(name, 2, 8, 2), made_image(name, 3, 2, 2)
    ids, images = prompt_of([11, 12, 13], first, [14], second, [15], third, [15, 16], made_image(name, 4, 6, 4))
    plain = torch.tensor([[IMAGE_TOKEN if token >= 1 << 30 else token for token in ids]])
    grids, kinds = torch.tensor([image.grid for image in images]), (plain == IMAGE_TOKEN).int()
    expected, _ = pair_of(name).theirs.model.get_rope_index(plain, mm_token_type_ids=kinds, image_grid_thw=grids)
    slices = [
        Slice("a", start, len(ids[start : start + cut]), ids[start : start + cut], [], None, 0, images=images)
        for start in range(0, len(ids), cut)
    ]
    found = torch.cat([torch.from_numpy(mrope_positions(planned, 2)) for planned in slices], dim=1)
    assert found.tolist() == expected[:, 0].tolist()

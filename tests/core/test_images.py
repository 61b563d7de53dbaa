from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.images import ImageInput, are_placed, image_tokens, is_image_token
from penstock.core.model_config import VisionConfig

SQUARE = VisionConfig("idefics3", 32, 48, num_layers=1, num_heads=2, patch_size=4, merge_size=2, image_size=8)
ANY_SIZE = VisionConfig(
    "qwen2_5_vl", 32, 48, num_layers=1, num_heads=2, patch_size=2, merge_size=2, temporal_patch_size=2, window_size=8
)
A = ImageInput("aa" * 16, 1, 1, [1, 2, 2], [3, 8, 8], bytes(4 * 3 * 64))
B = ImageInput("bb" * 16, 0, 2, [1, 2, 4], [8, 24], bytes(4 * 8 * 24))


def test_tokens_of_images_are_above_every_vocabulary_and_fit_32_bits() -> None:
    assert is_image_token(*image_tokens("0" * 8, 1))
    assert image_tokens("f" * 8, 1)[0] < 1 << 31
    assert not is_image_token(1 << 20)


def test_tokens_that_follow_each_other_have_different_parts_of_the_digest() -> None:
    one, two = "00112233445566778899aabbccddeeff", "00112233445566778899aabbccddee00"
    assert len(set(image_tokens(one, 4))) == 4
    assert image_tokens(one, 9)[4:8] == image_tokens(one, 4)
    assert image_tokens(one, 3) == image_tokens(two, 3)
    assert image_tokens(one, 4) != image_tokens(two, 4)


def test_images_are_where_their_tokens_are() -> None:
    (one,), (two, _) = image_tokens(A.digest, 1), image_tokens(B.digest, 2)
    second = replace(B, start=3)
    assert are_placed([A, second], [5, one, 6, two, two, 7])
    assert are_placed([replace(A, start=0)], [one])
    for images, prompt in (
        ([A], [5, 6, 7]),  # no tokens
        ([A], [one, 5]),  # elsewhere
        ([A], [5, two]),  # another image
        ([A], [5]),  # beyond the end
        ([A], [5, one, two]),  # tokens of nobody
        ([second], [5, 6, 7, two]),  # too few
        ([second, A], [5, one, 6, two, two]),  # in another order
        ([replace(A, start=-1)], [one, 5]),
    ):
        assert not are_placed(images, prompt)


def test_an_image_as_it_should_be_is_no_problem() -> None:
    assert SQUARE.problem(A) is None
    assert ANY_SIZE.problem(B) is None


@pytest.mark.parametrize(
    ("vision", "image"),
    [
        (SQUARE, replace(A, values=b"")),
        (SQUARE, replace(A, shape=[3, 64])),
        (SQUARE, replace(A, num_tokens=2)),
        (SQUARE, B),
        (ANY_SIZE, A),
        (ANY_SIZE, replace(B, grid=[1, 1, 8])),
        (ANY_SIZE, replace(B, grid=[2, 2, 2])),
        (ANY_SIZE, replace(B, grid=[1, 2, 4, 1])),
        (ANY_SIZE, replace(B, grid=[1, 0, 0])),
        (ANY_SIZE, replace(B, num_tokens=3)),
        (ANY_SIZE, replace(B, shape=[4, 48])),
        (ANY_SIZE, replace(B, shape=[-8, -24])),
    ],
)
def test_an_image_that_the_encoder_cannot_take_is_refused(vision: VisionConfig, image: ImageInput) -> None:
    assert vision.problem(image)

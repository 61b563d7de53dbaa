"""Images of a prompt, once they are numbers: which tokens of the prompt they are, and what an encoder makes them from.

A token of an image has no place in the vocabulary: the runner takes its embedding from the encoder. Its id in
`prompt_ids` is above every vocabulary and made of the image's digest. So block hashes, prefix cache, routing index and
KV transfer tell two images apart without knowing that there are images.

A digest is of the bytes as they were sent and of what a processor makes of them, not of pixels: a gateway knows it
without decoding the image. Tokens that follow each other have different parts of it, so that an attacker who wants
another image to be taken for this one has to find all of the digest again, and not 30 bits of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FIRST_IMAGE_TOKEN = 1 << 30  # vocabularies end far below, and int32 ends above the last one


_DIGITS = 8  # hexadecimal ones of the digest that a token has, but for two bits


def image_tokens(digest: str, count: int) -> list[int]:
    """The ids of the first tokens of the image with this digest, a text of hexadecimal digits."""
    words = [digest[at : at + _DIGITS] for at in range(0, len(digest), _DIGITS)]
    ids = [FIRST_IMAGE_TOKEN | int(word, 16) & (FIRST_IMAGE_TOKEN - 1) for word in words]
    return (ids * (count // len(ids) + 1))[:count]


def is_image_token(token_id: int) -> bool:
    return token_id >= FIRST_IMAGE_TOKEN


class ImageInput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One image of a request, as the model's encoder takes it."""

    digest: str  # hexadecimal; no two images that differ in `values` or `grid` have the same
    start: int  # its first token's position in the prompt
    num_tokens: int
    grid: list[int]  # how its patches lie: frames, rows, columns; what the family's processor says
    shape: list[int]  # of `values`
    values: bytes  # float32, as the family's processor made them; the last member: see `engine.client.encoded`


def are_placed(images: Sequence[ImageInput], prompt_ids: Sequence[int]) -> bool:
    """Whether the tokens of these images, and no others, are tokens of images in the prompt: one after the other, each
    where it says."""
    end = 0
    for image in images:
        begin, text = image.start, prompt_ids[end : image.start]
        if begin < end or any(map(is_image_token, text)):
            return False
        end = begin + image.num_tokens
        if list(prompt_ids[begin:end]) != image_tokens(image.digest, image.num_tokens):
            return False
    return not any(map(is_image_token, prompt_ids[end:]))

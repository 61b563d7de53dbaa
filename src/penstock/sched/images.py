"""Image scheduling: which images a step encodes, and whose embeddings stay. Digests and counts: it never sees a pixel.

An image is encoded in the first step that computes one of its tokens, and kept beside others by its digest, within a
bound of tokens: prompts whose tokens are all in the KV cache need no encoder. A prompt whose image is not encoded in
this step is computed up to there, and waits; others go on.

Encoding is counted in tokens of prompts, which take as long. Besides its decodes, a step encodes as much as it could
compute of prompts. An image that is more than that waits until the steps that it was kept out of had room for it
together: so images take no more of everybody's time than prompts do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.images import ImageInput


class ImageSlots:
    def __init__(self, max_tokens: int = 0, step_tokens: int = 0, *, price: float = 1.0) -> None:
        """`max_tokens`: room for embeddings, and so the largest image; 0: there are no images. `step_tokens`: of images
        that are encoded in a step, unless a single one is more. `price`: a token of an image, in tokens of prompts."""
        assert step_tokens <= max_tokens
        self.max_tokens = max_tokens
        self.encoded_tokens = 0  # since the start
        self.price = price
        self._step_tokens = step_tokens
        self._limit = float(step_tokens)  # tokens that the plan being made may encode
        self._credit = 0.0  # of that, what images have waited for
        self._wanted = 0  # tokens of the largest image that the last plan was too small for
        self._kept: dict[str, int] = {}  # tokens by digest; who was used longest ago comes first
        self._num_kept = 0  # tokens of these
        self._used: set[str] = set()  # by the plan being made
        self._spent = 0  # tokens that it encodes
        self._is_alone = True  # nobody decodes beside it
        self._encodes: list[ImageInput] = []
        self._drops: list[str] = []

    @property
    def num_kept(self) -> int:
        """Tokens whose embeddings are kept."""
        return self._num_kept

    def begin(self, room: int | None = None) -> None:
        """A plan is being made. `room`: tokens of prompts that it may compute beside decodes; None: there are none."""
        self._used = {image.digest for image in self._encodes}  # of a plan that came to nothing
        self._spent = sum(image.num_tokens for image in self._encodes)
        if room is None:
            self._limit = self._step_tokens
        else:
            share = max(room, 1) / self.price
            self._credit = min(self._credit + share, max(share, self._wanted))
            self._limit = min(self._credit, max(self._step_tokens, self._wanted))
        self._is_alone = room is None
        self._wanted = 0

    def has_room(self, images: Sequence[ImageInput], start: int) -> bool:
        """Whether the token at `start` can be computed in this step."""
        return all(self._has_room(image) for image in _covered(images, start, start + 1))

    def reach(self, images: Sequence[ImageInput], start: int, count: int) -> int:
        """Number of tokens from `start` that this step can compute; their images will be encoded."""
        for image in _covered(images, start, start + count):
            if not self._has_room(image):
                return max(0, image.start - start)
            self._use(image)
        return count

    def _has_room(self, image: ImageInput) -> bool:
        if image.digest in self._kept:
            return True
        if self._spent + image.num_tokens > self._limit and not (self._is_alone and not self._spent):
            self._wanted = max(self._wanted, image.num_tokens)
            return False
        in_use = sum(self._kept[digest] for digest in self._used)
        return in_use + image.num_tokens <= self.max_tokens

    def _use(self, image: ImageInput) -> None:
        digest = image.digest
        self._used.add(digest)
        if digest in self._kept:
            self._kept[digest] = self._kept.pop(digest)
            return
        self._make_room(image.num_tokens)
        self._kept[digest] = image.num_tokens
        self._num_kept += image.num_tokens
        self._spent += image.num_tokens
        self._credit = max(0.0, self._credit - image.num_tokens)
        self.encoded_tokens += image.num_tokens
        self._encodes.append(image)

    def _make_room(self, num_tokens: int) -> None:
        for digest in list(self._kept):
            if self._num_kept + num_tokens <= self.max_tokens:
                return
            if digest not in self._used:
                self._num_kept -= self._kept.pop(digest)
                self._drops.append(digest)

    def take(self) -> tuple[list[ImageInput], list[str]]:
        """Returns the images that an outgoing plan encodes and the digests it forgets before, and clears both lists."""
        encodes, drops, self._encodes, self._drops = self._encodes, self._drops, [], []
        return encodes, drops

    def work(self, encodes: Iterable[ImageInput]) -> int:
        """Work of encoding these images, in tokens of prompts."""
        return round(self.price * sum(image.num_tokens for image in encodes))

    def undo(self, encodes: Iterable[ImageInput]) -> None:
        """The step that was to encode these failed: nobody knows which are there."""
        for image in encodes:
            if image.digest in self._kept:
                self._num_kept -= self._kept.pop(image.digest)
                self._drops.append(image.digest)

    def clear(self) -> None:
        """The device's memory is gone, and all embeddings with it."""
        self._drops += [digest for digest in self._kept if all(digest != image.digest for image in self._encodes)]
        self._kept.clear()
        self._encodes.clear()
        self._num_kept = 0


def _covered(images: Sequence[ImageInput], start: int, end: int) -> list[ImageInput]:
    return [image for image in images if image.start < end and image.start + image.num_tokens > start]

"""A fake embedder, for tests: vectors that tell which text, and only which text, they are of."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from penstock.core.token_logprobs import TokenScore, write_rows

DIMENSIONS = 8


def fake_vector(text: Sequence[int]) -> list[float]:
    """Vector of length one; texts of the same tokens, in whatever order, have the same."""
    counts = [1.0 + sum(token_id % DIMENSIONS == i for token_id in text) for i in range(DIMENSIONS)]
    length = math.hypot(*counts)
    return [count / length for count in counts]


def fake_score(text: Sequence[int], at: int, num_top: int) -> TokenScore:
    """The score of the token at this place; the likeliest are the one before it and those that follow that in the
    vocabulary."""
    top = [(text[at - 1] + place, -1.0 - place) for place in range(num_top)]
    return TokenScore(-float(text[at]), text[at], top)


class FakeEmbedder:
    def __init__(self, most_tokens: int = 64, poison: int | None = None) -> None:
        """`poison`: a token that no batch survives."""
        self.most_tokens = most_tokens
        self.batches: list[int] = []  # texts in each
        self._poison = poison

    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        self._look(texts)
        return [array("f", fake_vector(text)).tobytes() for text in texts]

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        """The fewer tokens come before those that count, the likelier these are."""
        self._look(texts)
        return [float(count - len(text)) / 10 for text, count in zip(texts, scored, strict=True)]

    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]:
        """Scores by `fake_score`."""
        self._look(texts)
        return [write_rows(fake_score(text, at, num_top) for at in range(1, len(text))) for text in texts]

    def _look(self, texts: Sequence[Sequence[int]]) -> None:
        if any(self._poison in text for text in texts):
            raise RuntimeError("poison")
        self.batches.append(len(texts))

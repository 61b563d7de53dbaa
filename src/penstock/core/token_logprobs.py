"""Log probabilities of the tokens of whole texts, as they cross processes: 32-bit numbers, a row for each token.

A row is the token's log probability and its rank (1: the likeliest), then the ids of the likeliest tokens, then their
log probabilities. A text's first token has none: nothing tells it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec


class TokenScore(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int
    top: list[tuple[int, float]]  # the likeliest tokens, best first


def write_rows(scores: Iterable[TokenScore]) -> bytes:
    return b"".join(
        [
            array("f", [one.logprob]).tobytes()
            + array("i", [one.rank, *(token_id for token_id, _ in one.top)]).tobytes()
            + array("f", [logprob for _, logprob in one.top]).tobytes()
            for one in scores
        ]
    )


def read_rows(values: bytes, lengths: Sequence[int], num_top: int) -> list[list[TokenScore]]:
    """Scores of texts of so many tokens, which come one after another."""
    width = 2 + 2 * num_top
    ints, floats = memoryview(values).cast("i"), memoryview(values).cast("f")
    assert len(ints) == width * sum(length - 1 for length in lengths)
    found, begin = [], 0
    for length in lengths:
        rows = range(begin, begin + (length - 1) * width, width)
        begin = rows.stop
        found.append(
            [
                TokenScore(
                    floats[at],
                    ints[at + 1],
                    list(zip(ints[at + 2 : at + 2 + num_top], floats[at + 2 + num_top : at + width], strict=True)),
                )
                for at in rows
            ]
        )
    return found

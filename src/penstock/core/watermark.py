"""Marks in generated text that only the holder of a key can find: what a mark is, and the keyed bits it is made of.

Every token that may come next has 64 random bits of its own, a function of the key, the tokens before it and itself.
`runner.watermark` lets them weigh on what is chosen, `text.watermark` finds that they did. Bits are int64, because
numpy and torch then wrap and shift alike, and one `mix` serves them both; nothing here imports either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta

KEY_BYTES = 32
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}\Z"

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Gamma = Annotated[float, Meta(ge=0.01, le=0.9)]
Delta = Annotated[float, Meta(gt=0, le=50)]
Width = Annotated[int, Meta(ge=1, le=16)]

# The constants of splitmix64, as int64.
_GOLDEN, _FIRST, _SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_UNIT = 1 << 52  # with a half added, every fraction of it is exact in a double, and none is 0 or 1


class Scheme(enum.StrEnum):
    GREEN = "green"  # Kirchenbauer et al. 2023: a keyed part of the vocabulary is preferred, anew at every token
    GUMBEL = "gumbel"  # Aaronson 2022: keyed numbers in place of chance; one answer is distributed as without a mark


class Seeding(enum.StrEnum):
    LEFT = "left"  # by all tokens of the context together
    SELF = "self"  # by the candidate and one token of the context, which the key picks: an edit spoils less


class Watermark(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    secret: bytes
    scheme: Scheme = Scheme.GREEN
    gamma: Gamma = 0.25  # the green part of the vocabulary
    delta: Delta = 2.0  # what is added to its logits, before temperature
    width: Width = 4  # tokens of context
    seeding: Seeding = Seeding.LEFT

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        if self.scheme is Scheme.GUMBEL and self.seeding is Seeding.SELF:
            raise ValueError("gumbel goes with left seeding: its numbers must be fresh wherever the context is")

    def __repr__(self) -> str:
        return f"Watermark({self.scheme})"  # logs and tracebacks show this

    @property
    def green_below(self) -> int:
        """A token is green whose `fraction_bits` are below this."""
        return int(self.gamma * _UNIT)

    def seeds(self, context: Sequence[int]) -> list[int]:
        """Seeds that the bits after `context`, the last `width` tokens, are mixed from: one, or one for each token."""
        if self.seeding is Seeding.LEFT:
            return [self.seed(context)]
        return [self.seed((token_id,)) for token_id in context]

    def seed(self, token_ids: Sequence[int]) -> int:
        """A keyed hash, so that nobody without the key can tell one seed from another's; int64."""
        words = b"".join([token_id.to_bytes(4, "little") for token_id in token_ids])
        return int.from_bytes(blake2b(words, digest_size=8, key=self.secret).digest(), "little", signed=True)


def steps(token_ids: Any) -> Any:
    """Places of tokens in the streams of numbers that seeds begin; of an int64 array or tensor."""
    return (token_ids + 1) * _GOLDEN


def mix(state: Any) -> Any:
    """The finaliser of splitmix64, on an int64 array or tensor, in place. Returns it."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        low = state >> shift
        low &= (1 << (64 - shift)) - 1  # the sign must not come along
        state ^= low
        if factor is not None:
            state *= factor
    return state


def fraction_bits(bits: Any) -> Any:
    """The upper 52 bits, in place: a whole number that is a fraction of 2**52."""
    bits >>= 12
    bits &= _UNIT - 1
    return bits


def fractions(bits: Any) -> Any:
    """Fractions of `fraction_bits`: numbers strictly between 0 and 1, in double precision."""
    return (bits + 0.5) / _UNIT

"""Sampling parameters: how one request wants its tokens chosen. Already validated: `api` checks what clients send."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.watermark import Watermark


class SamplingParams(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: the edge draws one when the client did not
    num_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only; k: the k best too
    watermark: Watermark | None = None
    allowed_ids: list[int] = []  # nothing else may come; empty: anything may
    bad_words: list[list[int]] = []  # token ids that may not come in a row, in the answer

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def looks_back(self) -> bool:
        """Whether the next token depends on which ones came before in a way only the host knows."""
        has_long_words = any(len(word) > 1 for word in self.bad_words)
        return self.has_penalties or self.watermark is not None or has_long_words

    def words_ending(self, output: Sequence[int]) -> list[int]:
        """Tokens that would end a bad word after this output."""
        return [
            last
            for *before, last in self.bad_words
            if not before or (len(output) >= len(before) and list(output[-len(before) :]) == before)
        ]


def keyed_uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that a request with `seed` uses for its token at `position`.

    A pure function of the two, so a stream draws the same numbers whatever else is in the batch, after a
    preemption, and on another replica. Two rounds of the splitmix64 finaliser.
    """
    mask = 0xFFFFFFFFFFFFFFFF
    state = seed & mask
    for word in (0x9E3779B97F4A7C15, (position + 1) * 0xD1B54A32D192ED03):
        state = (state + word) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 11) / (1 << 53)

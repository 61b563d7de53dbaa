"""The demand: how many requests a second, how long, how much of their prompts is shared, how fast they want it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from penstock.capacity.model_bytes import pairs
from penstock.core.errors import ConfigError

GROUPS = 128  # of prompts of like length: as fine as a percentile needs


@dataclass(frozen=True)
class Target:
    """A latency that `percentile` of the requests keep. None: no target of that kind."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    percentile: float = 0.95

    def __post_init__(self) -> None:
        if not 0.5 <= self.percentile < 1:
            raise ConfigError(f"a percentile of {100 * self.percentile:g} is not in 50 to 99.9", param="percentile")
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if value is not None and value <= 0:
                raise ConfigError(f"a target of {value:g} s for {name} cannot be kept", param=name)


@dataclass(frozen=True)
class Demand:
    rate: float  # requests per second
    lengths: tuple[tuple[int, int], ...]  # (prompt, output) tokens: a sample of the requests, each as likely
    prefix_share: float = 0.0  # of prompt tokens, those that a replica has in its cache
    target: Target = Target()

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate:g} requests a second cannot be planned for", param="rate")
        if not 0 <= self.prefix_share < 1:
            raise ConfigError(f"a prefix share of {self.prefix_share:g} is not in 0 to 1", param="prefix-share")
        if not self.lengths or any(prompt < 1 or output < 1 for prompt, output in self.lengths):
            raise ConfigError("every request has a prompt and an output of one token at least", param="prompt")

    @cached_property
    def profile(self) -> Profile:
        lengths, count = self.lengths, len(self.lengths)
        computed = sorted((max(1, prompt - int(prompt * self.prefix_share)), prompt) for prompt, _ in lengths)
        work = [(tokens, pairs(prompt - tokens, prompt)) for tokens, prompt in computed]
        return Profile(
            prompt_tokens=sum(prompt for prompt, _ in lengths) / count,
            output_tokens=sum(output for _, output in lengths) / count,
            prefill_tokens=sum(tokens for tokens, _ in work) / count,
            prefill_pairs=sum(looked_at for _, looked_at in work) / count,
            decodes=sum(output - 1 for _, output in lengths) / count,
            decode_context=sum(pairs(prompt, prompt + output - 1) for prompt, output in lengths) / count,
            longest=max(prompt + output for prompt, output in lengths),
            prompts=_grouped(work),
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts of like length: the share of all that they are, and what must be computed of one."""

    share: float
    tokens: float
    pairs: float


@dataclass(frozen=True)
class Profile:
    """A demand's requests, on average, in the terms of a step's cost."""

    prompt_tokens: float
    output_tokens: float
    prefill_tokens: float  # that no cache holds
    prefill_pairs: float
    decodes: float  # steps after the one that ends the prompt, which gives the first token
    decode_context: float  # tokens of context that they read, all together
    longest: int  # prompt and output of the longest request
    prompts: tuple[Prompts, ...]

    @property
    def context(self) -> float:
        """The context of a sequence that decodes, averaged over its life."""
        return self.decode_context / self.decodes if self.decodes else self.prompt_tokens


def _grouped(work: Sequence[tuple[int, int]]) -> tuple[Prompts, ...]:
    """`work` is sorted. Equal groups, each at its mean."""
    edges = sorted({len(work) * i // GROUPS for i in range(GROUPS + 1)})
    groups = [work[start:end] for start, end in pairwise(edges)]
    return tuple(
        Prompts(len(each) / len(work), *(sum(values) / len(each) for values in zip(*each, strict=True)))
        for each in groups
    )

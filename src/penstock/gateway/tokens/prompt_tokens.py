"""How large the prompts of one model are, as well as it can be known at each moment, cheapest first.

`estimate` is what such prompts come to, learnt from what was used: for the expected load. The tokenizer's bound is
never less than the truth: for limits, where nothing is in doubt. `count` is the truth, from the replica's own
tokenizer; a provider hands over none, and a token for every byte is its bound.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

from penstock.gateway.tokens.prompt_tokenizer import HashedPrompt, PromptTokenizer

_INLINE_BYTES = 512  # counted in less than 200 µs; a longer body is counted in a thread
_LOOKED_UP_BYTES = 128 << 10  # of a body that is hashed in 200 µs; in a thread a longer one is looked up too
_MEMORY = 64  # requests or so
_MARGIN = 2.0  # mean deviations above the mean


class PromptTokens:
    def __init__(self, pool: Executor) -> None:
        self.prompt_tokenizer: PromptTokenizer | None = None
        self.num_counting = 0  # in threads
        self._pool = pool
        self._num_told = 0
        self._ratio = 1.0  # tokens per byte of a request: the mean, and a margin of how far off it is on average
        self._mean = 1.0
        self._deviation = 0.0

    def estimate(self, num_bytes: int) -> int:
        """Cautious, and never more than a token for each byte."""
        return int(num_bytes * self._ratio) + 1 if self._ratio < 1.0 else num_bytes

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        """Learns how many tokens so many bytes turned out to have. Once enough is known, one of eight is looked at."""
        self._num_told = told = self._num_told + 1
        if (told > _MEMORY and told % 8) or num_tokens <= 0:
            return
        ratio, weight = num_tokens / num_bytes, max(1.0 / told, 1.0 / _MEMORY)
        if told > 1:
            self._deviation += weight * (abs(ratio - self._mean) - self._deviation)
        self._mean += weight * (ratio - self._mean)
        self._ratio = self._mean + _MARGIN * self._deviation

    def count(self, path: bytes, body: bytes, tenant: str) -> int | asyncio.Future[int]:
        """Raises InvalidRequest, as the future does, for what the replica would refuse too. `tenant`: its namespace."""
        assert self.prompt_tokenizer is not None
        if len(body) <= _INLINE_BYTES:
            return self.prompt_tokenizer.count(path, body, tenant)
        self.num_counting += 1
        counting = asyncio.get_running_loop().run_in_executor(
            self._pool, self.prompt_tokenizer.count, path, body, tenant
        )
        counting.add_done_callback(self._counted)
        return counting

    def names(
        self, path: bytes, body: bytes, tenant: str, adapter: str = ""
    ) -> HashedPrompt | asyncio.Future[HashedPrompt]:
        """The prompt's length and the names of its blocks; raises as `count` does."""
        assert self.prompt_tokenizer is not None
        known = (
            self.prompt_tokenizer.known_names(path, body, tenant, adapter) if len(body) <= _LOOKED_UP_BYTES else None
        )
        if known is not None:
            return known
        self.num_counting += 1
        naming = asyncio.get_running_loop().run_in_executor(
            self._pool, self.prompt_tokenizer.names, path, body, tenant, adapter
        )
        naming.add_done_callback(self._counted)
        return naming

    def _counted(self, done: asyncio.Future[Any]) -> None:
        self.num_counting -= 1

"""Texts that wait for their vectors or scores: batched by tokens, across requests, in the order they came.

It knows what a text weighs and who asked for it. The runner makes the numbers, behind `Embedder`.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.core.clock import Clock
from penstock.engine.messages import Embed, Embedded

log = logging.getLogger("penstock.engine")


class Embedder(Protocol):
    most_tokens: int  # of a batch; a single text may be longer

    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        """A vector for each, float32 of length one."""

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        """Mean log probability of the last `scored` tokens of each text."""

    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]:
        """Log probabilities of each text's tokens: see `core.token_logprobs`."""


@dataclass
class _Waiting:
    message: Embed
    parts: list[bytes] = field(default_factory=list)
    device_s: float = 0.0
    num_taken: int = 0

    def take(self, room: int, *, at_least: int) -> range:
        """The next texts that fit."""
        first = end = self.num_taken
        texts = self.message.texts
        while end < len(texts) and (end - first < at_least or len(texts[end]) <= room):
            room -= len(texts[end])
            end += 1
        self.num_taken = end
        return range(first, end)


class EmbedBatch(NamedTuple):
    """Texts that were computed together, and the requests that are answered by it."""

    answers: list[Embedded]
    num_texts: int
    num_tokens: int
    device_s: float


class EmbedQueue:
    def __init__(self, embedder: Embedder | None, *, num_devices: int = 1) -> None:
        """`embedder`: None refuses everything. `num_devices`: those that work on every batch."""
        self._num_devices = num_devices
        self._embedder = embedder
        self._waiting: deque[_Waiting] = deque()
        self.num_tokens = 0  # that wait

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, message: Embed) -> None:
        self._waiting.append(_Waiting(message))
        self.num_tokens += sum(map(len, message.texts))

    def abort(self, request_id: str) -> None:
        for one in [one for one in self._waiting if one.message.request_id == request_id]:
            self._leave(one)

    def step(self, clock: Clock) -> EmbedBatch:
        """Compute one batch: as many texts as fit, of as many requests as want the same."""
        assert self._waiting
        batch = self._next_batch()
        texts = [one.message.texts[i] for one, part in batch for i in part]
        num_tokens = sum(map(len, texts))
        self.num_tokens -= num_tokens
        began_s = clock.now()
        try:
            found = self._compute(batch, texts)
        except Exception as error:
            if self._embedder is not None:
                log.exception("a batch of %d texts and %d tokens failed", len(texts), num_tokens)
            told = "this model embeds no texts here" if self._embedder is None else f"the engine failed: {error}"
            return EmbedBatch([self._fail(one, told) for one, _ in batch], 0, 0, 0.0)
        device_s = clock.now() - began_s
        for one, part in batch:
            one.parts += found[: len(part)]
            del found[: len(part)]
            share = sum(len(one.message.texts[i]) for i in part) / num_tokens
            one.device_s += device_s * self._num_devices * share
        done = [one for one, _ in batch if len(one.parts) == len(one.message.texts)]
        for one in done:
            self._waiting.remove(one)
        answers = [
            Embedded(one.message.request_id, b"".join(one.parts), one.device_s, model=one.message.model) for one in done
        ]
        return EmbedBatch(answers, len(texts), num_tokens, device_s)

    def _next_batch(self) -> list[tuple[_Waiting, range]]:
        room = self._embedder.most_tokens if self._embedder is not None else 0
        wanted = _kind(self._waiting[0].message)
        batch: list[tuple[_Waiting, range]] = []
        for one in self._waiting:
            if _kind(one.message) != wanted:
                break
            part = one.take(room, at_least=0 if batch else 1)
            if not part:
                break
            batch.append((one, part))
            room -= sum(len(one.message.texts[i]) for i in part)
        return batch

    def _compute(self, batch: list[tuple[_Waiting, range]], texts: list[list[int]]) -> list[bytes]:
        if self._embedder is None:
            raise RuntimeError
        first = batch[0][0].message
        if first.num_top is not None:
            return self._embedder.token_logprobs(texts, first.num_top)
        if first.scored is None:
            return self._embedder.embed(texts)
        scored = [(one.message.scored or [])[i] for one, part in batch for i in part]
        return [array("f", [score]).tobytes() for score in self._embedder.score(texts, scored)]

    def _fail(self, one: _Waiting, error: str) -> Embedded:
        self._leave(one)
        return Embedded(one.message.request_id, error=error, model=one.message.model)

    def _leave(self, one: _Waiting) -> None:
        self._waiting.remove(one)
        self.num_tokens -= sum(map(len, one.message.texts[one.num_taken :]))


def _kind(message: Embed) -> tuple[bool, int | None]:
    """Messages of one kind can be computed together."""
    return message.scored is not None, message.num_top

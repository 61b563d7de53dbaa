"""Conversations of users, turn by turn: made up, replayed from a trace, or your own. The n-th is always the same.

It knows no server: a conversation says what is asked and when; the answers in between are the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Protocol

from penstock.workload.lengths import Lengths
from penstock.workload.trace import BLOCK_TOKENS, Arrival
from penstock.workload.words import Scale, text

Message = dict[str, Any]  # role and content, as the API takes them


@dataclass(frozen=True, slots=True)
class Turn:
    messages: tuple[Message, ...]  # what is new: they follow the answer before
    output_tokens: int
    think_s: float = 0.0  # from the end of the answer before to this turn
    body: dict[str, Any] = field(default_factory=dict)  # further fields of this request


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    session: str | None = None  # as a client would name it


class Source(Protocol):
    @property
    def count(self) -> int | None:
        """None: as many as anyone asks for."""

    def at_s(self, number: int) -> float | None:
        """Returns when that one begins, in seconds of the workload's own; None: whenever it is its turn."""

    def conversation(self, number: int) -> Conversation: ...


@dataclass(frozen=True)
class Synthetic:
    """Random words. `shared_tokens` are a system prompt, one of `num_prefixes`, the same for all who have it."""

    words: Sequence[str]
    scale: Scale
    seed: str
    prompt: Lengths
    output: Lengths
    num_turns: Lengths = field(default_factory=lambda: Lengths("fixed", 1))
    think_s: float = 0.0  # the mean; each pause is drawn from an exponential distribution
    shared_tokens: int = 0
    num_prefixes: int = 1
    context: int | None = None  # tokens of prompt and output together that the server takes
    count: int | None = None

    def at_s(self, number: int) -> None:
        return None

    def conversation(self, number: int) -> Conversation:
        source = Random(f"{self.seed} {number}")
        turns: list[Turn] = []
        used = self.shared_tokens
        for index in range(self.num_turns.draw(source)):
            num_tokens, output = self.prompt.draw(source), self.output.draw(source)
            num_tokens, output = clipped(num_tokens, output, None if self.context is None else self.context - used)
            if num_tokens < 1:
                break  # the conversation has filled the context
            used += num_tokens + output
            asked: list[Message] = [
                {"role": "user", "content": text(self.words, self.scale.words(num_tokens), source)},
            ]
            if index == 0 and self.shared_tokens:
                asked.insert(0, {"role": "system", "content": self._shared(number % self.num_prefixes)})
            think_s = source.expovariate(1 / self.think_s) if index and self.think_s else 0.0
            turns.append(Turn(tuple(asked), output, think_s))
        return Conversation(tuple(turns), session=f"{self.seed}-{number}" if len(turns) > 1 else None)

    def _shared(self, group: int) -> str:
        num_words = max(1, round(self.shared_tokens / self.scale.tokens_per_word))
        return text(self.words, num_words, Random(f"{self.seed} shared {group}"))


class Replayed:
    """The requests of a trace at its times, `speed` times as fast. Equal block names become equal words, so whoever
    shared a beginning in the trace shares one here; what does not fit the server's context is cut at its end."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        words: Sequence[str],
        scale: Scale,
        seed: str,
        *,
        speed: float = 1.0,
        context: int | None = None,
    ) -> None:
        self._arrivals = arrivals
        self._words = words
        self._scale = scale
        self._seed = seed
        self._speed = speed
        self._context = context
        self._num_block_words = max(1, round(BLOCK_TOKENS / scale.tokens_per_word))
        self._block = lru_cache(maxsize=4096)(self._new_block)  # about 14 MB

    @property
    def count(self) -> int:
        return len(self._arrivals)

    @property
    def num_clipped(self) -> int:
        return sum(self._clipped(one) != (one.prompt_tokens, one.output_tokens) for one in self._arrivals)

    def at_s(self, number: int) -> float:
        return self._arrivals[number].at_s / self._speed

    def conversation(self, number: int) -> Conversation:
        arrival = self._arrivals[number]
        num_tokens, output = self._clipped(arrival)
        num_words = self._scale.words(num_tokens)
        if arrival.blocks:
            content = self._from_blocks(arrival.blocks, num_words)
        else:
            content = text(self._words, num_words, Random(f"{self._seed} {number}"))
        turn = Turn(({"role": "user", "content": content},), output)
        return Conversation((turn,), arrival.session or None)

    def _clipped(self, arrival: Arrival) -> tuple[int, int]:
        return clipped(arrival.prompt_tokens, arrival.output_tokens, self._context)

    def _from_blocks(self, blocks: Sequence[int], num_words: int) -> str:
        parts: list[str] = []
        for name in blocks:
            if num_words <= 0:
                break
            words = self._block(name)
            parts += words if num_words >= len(words) else words[:num_words]
            num_words -= len(words)
        if num_words > 0:  # a trace may name fewer blocks than its length has
            parts += Random(f"{self._seed} tail {blocks}").choices(self._words, k=num_words)
        return "".join(parts)

    def _new_block(self, name: int) -> list[str]:
        return Random(f"{self._seed} block {name}").choices(self._words, k=self._num_block_words)


def clipped(prompt_tokens: int, output_tokens: int, context: int | None) -> tuple[int, int]:
    """Returns the lengths that fit: the answer keeps its own unless it alone would take more than half."""
    if context is None or prompt_tokens + output_tokens <= context:
        return prompt_tokens, output_tokens
    output = min(output_tokens, max(1, context // 2))
    return min(prompt_tokens, context - output), output

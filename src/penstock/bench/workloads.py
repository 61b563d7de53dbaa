"""Workloads: how many requests, how long, how many at once, and the words in them.

Prompts are made of words that are one token each, so that token counts are exact though every server is sent text. It
knows no server and no clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.workload.conversations import Conversation, Turn


@dataclass(frozen=True)
class Workload:
    name: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int
    shared_tokens: int = 0  # of the prompt's tokens, those that every request begins with


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


# By kind of bench. Those of `http` are a GPU's, the same as in `bench.engine`: all requests at once.
WORKLOADS = {
    "cpu": _by_name(
        Workload("decode1", prompt_tokens=128, output_tokens=128, concurrency=1, num_requests=6),
        Workload("c8", prompt_tokens=128, output_tokens=128, concurrency=8, num_requests=64),
        Workload("c32", prompt_tokens=128, output_tokens=128, concurrency=32, num_requests=64),
        Workload("prefix", prompt_tokens=1056, output_tokens=32, concurrency=8, num_requests=64, shared_tokens=1024),
    ),
    "http": _by_name(
        Workload("W1", prompt_tokens=128, output_tokens=256, concurrency=1, num_requests=1),
        Workload("W1b", prompt_tokens=128, output_tokens=256, concurrency=8, num_requests=8),
        Workload("W2", prompt_tokens=512, output_tokens=256, concurrency=256, num_requests=256),
        Workload("W4", prompt_tokens=2176, output_tokens=64, concurrency=256, num_requests=256, shared_tokens=2048),
        Workload("W6", prompt_tokens=4096, output_tokens=1, concurrency=32, num_requests=32),
    ),
}
WARM_UP = Workload("warm-up", prompt_tokens=128, output_tokens=16, concurrency=4, num_requests=8)


def choose(names: str | None, known: Mapping[str, Workload]) -> list[Workload]:
    """Returns the workloads of a comma-separated list; None is all of them."""
    chosen = list(known) if names is None else names.split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"no workload {unknown[0]!r}; there are {', '.join(known)}", param="workload")
    return [known[name] for name in chosen]


def make_prompts(workload: Workload, words: Sequence[str], seed: str) -> list[str]:
    """One text per request. A new seed makes all of it new, the shared beginning too: no cache holds any of it yet."""
    source = random.Random(f"{workload.name} {seed}")
    shared = source.choices(words, k=workload.shared_tokens)
    num_own = workload.prompt_tokens - workload.shared_tokens
    return ["".join(shared + source.choices(words, k=num_own)) for _ in range(workload.num_requests)]


@dataclass(frozen=True)
class Prompts:
    """Given texts as a source of single requests."""

    texts: Sequence[str]
    output_tokens: int

    @property
    def count(self) -> int:
        return len(self.texts)

    def at_s(self, number: int) -> None:
        return None

    def conversation(self, number: int) -> Conversation:
        message = {"role": "user", "content": self.texts[number]}
        return Conversation((Turn((message,), self.output_tokens),))

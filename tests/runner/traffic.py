"""Random traffic without end: trees of shared prefixes, bursts, conversations that go on, clients who go away."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.core.request import Priority, Request
from penstock.core.sampling import SamplingParams
from penstock.engine.messages import Abort, Submit, ToEngine
from tests.runner.clients import Answer, Clients

GREEDY_SHARE = 0.6
MAX_FAMILIES = 6
GROUP = (8, 30)  # sequences that come together with one prefix


@dataclass(frozen=True)
class Limits:
    vocab_size: int
    max_model_len: int
    prefix_len: int  # of the longest that a family shares
    tail_len: int
    max_tokens: int
    most_open: int


class Traffic:
    """A script for `Clients`. It is quiet at times, so that the engine runs dry; it ends when `is_over` says so."""

    def __init__(self, limits: Limits, is_over: Callable[[int], bool], seed: int) -> None:
        self._limits = limits
        self._is_over = is_over  # told how many turns there were
        self._random = random.Random(seed)
        self._families: list[list[int]] = []
        self._count = 0

    def __call__(self, clients: Clients) -> Iterator[list[ToEngine]]:
        turns = 0
        while not self._is_over(turns):
            if self._random.random() < 0.004:
                while clients.open:
                    turns += 1
                    yield []
            turns += 1
            messages = self._turn(clients)
            yield messages

    def _turn(self, clients: Clients) -> list[ToEngine]:
        draw = self._random
        arrivals: list[Request] = []
        if len(clients.open) < self._limits.most_open:
            if draw.random() < 0.25:
                arrivals.append(self._anybody(clients))
            if draw.random() < 0.03:
                arrivals += self._group()
        gone = [name for name in clients.open if draw.random() < 0.004]
        if draw.random() < 0.005:
            gone = draw.sample(sorted(clients.open), k=len(clients.open) // 2)
        changed_their_mind = [request.id for request in arrivals if draw.random() < 0.03]
        aborts = [Abort(name) for name in (*gone, *changed_their_mind)]
        return [*(Submit(request) for request in arrivals), *aborts]

    def _anybody(self, clients: Clients) -> Request:
        """A new prompt, one of a family, one that was asked before, or the next turn of a conversation."""
        draw = self._random
        finished = list(clients.finished.values())[-50:]
        match draw.choice(["new", "family", "again", "conversation"]):
            case "again" if finished:
                return self._request(draw.choice(finished).request.prompt_ids)
            case "conversation" if finished:
                return self._request(self._continued(draw.choice(finished)))
            case "family":
                return self._request(self._member(self._family()))
        return self._request(self._tokens(draw.randint(1, self._limits.prefix_len)))

    def _continued(self, answer: Answer) -> list[int]:
        return [*answer.request.prompt_ids, *answer.token_ids, *self._tokens(self._random.randint(0, 10))]

    def _group(self) -> list[Request]:
        family = self._family()
        return [self._request(self._member(family)) for _ in range(self._random.randint(*GROUP))]

    def _family(self) -> list[int]:
        """A prefix, old or new; a new one may branch off an old one."""
        draw = self._random
        if self._families and draw.random() < 0.6:
            return draw.choice(self._families)
        trunk = draw.choice(self._families) if self._families and draw.random() < 0.6 else []
        longest = self._limits.prefix_len
        trunk = trunk[: draw.randint(0, longest // 2)]
        family = trunk + self._tokens(draw.randint(longest // 4, longest - len(trunk)))
        self._families = [*self._families, family][-MAX_FAMILIES:]
        return family

    def _member(self, family: list[int]) -> list[int]:
        draw = self._random
        whole = draw.random() < 0.8
        shared = family if whole else family[: draw.randint(1, len(family))]
        return shared + self._tokens(draw.randint(0, self._limits.tail_len))

    def _request(self, prompt: list[int]) -> Request:
        draw, limits = self._random, self._limits
        self._count += 1
        prompt = prompt[: limits.max_model_len - limits.max_tokens]
        return Request(
            id=f"r{self._count}",
            prompt_ids=prompt,
            max_tokens=draw.randint(1, limits.max_tokens),
            sampling=self._sampling(),
            stop_token_ids=draw.sample(range(limits.vocab_size), k=draw.choice([0, 0, 2])),
            min_tokens=draw.choice([0, 0, 5]),
            priority=draw.choice([Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.LOW]),
            namespace="other" if draw.random() < 0.1 else "",
        )

    def _sampling(self) -> SamplingParams:
        draw = self._random
        is_plain = draw.random() < 0.7
        return SamplingParams(
            temperature=0.0 if draw.random() < GREEDY_SHARE else draw.choice([0.6, 1.0, 1.4]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([None, 10]),
            presence_penalty=0.0 if is_plain else 0.8,
            repetition_penalty=1.0 if is_plain else draw.choice([1.0, 1.2]),
            logit_bias={} if is_plain else {draw.randrange(self._limits.vocab_size): 2.0},
            seed=self._count,
            num_logprobs=draw.choice([None, None, 3]),
        )

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._limits.vocab_size), k=count)

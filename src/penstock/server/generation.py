"""One API request in the engine: n choices of each prompt, from token ids to pieces of text, with usage and times."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

from penstock.api.openai import CompletionRequest, GenerationRequest, Usage, for_choice
from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.request import Request, RequestTimings
from penstock.engine.client import EngineClient, TokenStream
from penstock.server.choices import ChoiceText, Piece
from penstock.server.served_model import ServedModel


@dataclass
class Times:
    """When things happened to a request, by the server's clock."""

    arrived_s: float
    tokenized_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    engine: RequestTimings | None = None  # of the first choice to have a token


class Generation:
    """Use it as a context manager: leaving it ends whatever still runs in the engine."""

    def __init__(
        self, wanted: GenerationRequest, prompts: list[list[int]], model: ServedModel, request_id: str, times: Times
    ) -> None:
        vocab_size = model.config.vocab_size
        self.options = wanted.to_options(vocab_size)
        self.times = times
        self.num_prompt_tokens = sum(map(len, prompts))
        self.num_cached_tokens = 0
        sampling = wanted.to_sampling(vocab_size, fallback_seed=random.getrandbits(63))
        stop_token_ids = set(self.options.stop_token_ids)
        if not self.options.ignore_eos:
            stop_token_ids.update(model.config.eos_token_ids)
        is_explicit = not isinstance(wanted, CompletionRequest) or wanted.max_tokens is not None
        self._requests: list[Request] = []
        self._choices: dict[str, ChoiceText] = {}
        self._stream: TokenStream | None = None
        for prompt_ids in prompts:
            for choice in range(self.options.n):
                index = len(self._requests)
                request = Request(
                    id=f"{request_id}-{index}",
                    prompt_ids=prompt_ids,
                    max_tokens=model.fit_output(len(prompt_ids), self.options.max_tokens, is_explicit=is_explicit),
                    sampling=for_choice(sampling, choice),
                    stop_token_ids=sorted(stop_token_ids),
                    min_tokens=self.options.min_tokens,
                    priority=self.options.priority,
                    namespace=self.options.namespace,
                )
                self._requests.append(request)
                self._choices[request.id] = ChoiceText(index, prompt_ids, model.tokenizer, self.options)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def usage(self) -> Usage:
        return Usage.of(self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)

    def start(self, engine: EngineClient, *, max_open: int) -> None:
        if self.num_choices > max_open:
            raise InvalidRequest(f"{self.num_choices} choices; this server generates at most {max_open} at a time")
        if engine.num_open + self.num_choices > max_open:
            raise Overloaded(f"{engine.num_open} generations are open already", retry_after_s=1.0)
        self._stream = engine.open(self._requests)
        self._engine = engine

    async def pieces(self, clock: Clock) -> AsyncIterator[list[Piece]]:
        """What comes of all choices, several pieces at a time where the reader is slower than the engine."""
        assert self._stream is not None
        open_ids = set(self._choices)
        while open_ids:
            events = await self._stream.next()
            pieces = []
            for event in events:
                if event.request_id not in open_ids:
                    continue  # a stop string ended it while more tokens were on the way
                if event.timings is not None and self.times.engine is None:
                    self.times.engine = event.timings
                piece = self._choices[event.request_id].take(event)
                if piece.index % self.options.n == 0:  # its siblings found the same prompt, which is counted once
                    self.num_cached_tokens += event.cached_tokens or 0
                if piece.finish is not None:
                    open_ids.discard(event.request_id)
                    self._engine.abort(event.request_id)
                pieces.append(piece)
            self.times.last_token_s = clock.now()
            if self.times.first_token_s is None:
                self.times.first_token_s = self.times.last_token_s
            if pieces:
                yield pieces

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()

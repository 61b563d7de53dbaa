"""One prepared request in the engine: n choices of each prompt, from token ids to pieces of text; usage and times."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import msgspec

from penstock.api.openai import Usage, check_token_ids, for_choice
from penstock.api.relay import Resume
from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, UnsupportedParameter
from penstock.core.hashing import cache_namespace
from penstock.core.request import Cost, Request, RequestTimings, TokenEvent, TokenLogprobs
from penstock.core.watermark import Scheme
from penstock.engine.accounts import Meter
from penstock.engine.client import Buffer, EngineClient, encoded
from penstock.engine.token_stream import TokenStream
from penstock.server.choices import ChoiceText, Piece
from penstock.server.prepare import PreparedRequest
from penstock.server.prompt_scores import PromptScores
from penstock.text.detokenizer import Detokenizer
from penstock.text.tools import Part

_WORK_AT_A_TIME = 1024  # tokens and their alternatives that are read before others have their turn: some 5 ms
_TOKEN_BYTES = 4  # of its text
_SCORED_BYTES = 64  # of a token and its log probability in JSON


@dataclass
class Times:
    """The moments of a request, by the server's clock."""

    arrived_s: float
    tokenized_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    engine: RequestTimings | None = None  # of the first choice to have a token

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def decode_s(self) -> float:
        """The time from the first token to the last."""
        first_s, last_s = self.first_token_s, self.last_token_s
        return 0.0 if first_s is None or last_s is None else last_s - first_s

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the time to the first token, in their order; empty before that."""
        if (ttft_s := self.ttft_s) is None:
            return {}
        found = {"tokenize": self.tokenized_s - self.arrived_s}
        if self.engine is not None:
            if self.engine.pull_s:
                found["pull"] = self.engine.pull_s
            found |= {"queue": self.engine.queue_s, "prefill": self.engine.prefill_s}
        return found | {"first_token": max(0.0, ttft_s - sum(found.values()))}


class Generation:
    """A context manager: leaving it ends whatever still runs in the engine.

    A resumed one goes on where another replica's ended; `replayed` is what came of the last tokens known from there.
    """

    def __init__(self, prepared: PreparedRequest, request_id: str, times: Times) -> None:
        wanted, headers, model, calling = prepared.wanted, prepared.headers, prepared.model, prepared.calling
        vocab_size = model.config.vocab_size
        self.options = wanted.to_options(vocab_size)
        self.times = times
        self.tenant = headers.namespace
        self.kv_source = headers.kv_source
        self.num_prompt_tokens = sum(map(len, prepared.prompts))
        self.num_images, self.num_image_tokens = len(prepared.shown), prepared.num_image_tokens
        self.num_cached_tokens = 0
        self.num_resumed_tokens = 0
        self.num_prompt_logprobs = wanted.num_prompt_logprobs()
        self.prompt_scores: PromptScores | None = None  # set before it starts, if they are asked for
        self.replayed: Piece | None = None
        self.resumed_whole: list[Piece] = []  # of an answer that is not streamed: all that is known
        self.resumed_pieces: list[Piece] = []  # of a stream whose writer must see them: all before `replayed`
        self.resumed_parts: dict[int, list[Part]] = {}  # per choice, before `replayed`; where tools may be called
        sampling = wanted.to_sampling(vocab_size, fallback_seed=headers.origin.seed)
        if prepared.bad_words:
            sampling = msgspec.structs.replace(sampling, bad_words=prepared.bad_words)
        if prepared.watermark is not None:
            if sampling.is_greedy and wanted.watermark is not None and prepared.watermark.scheme is Scheme.GUMBEL:
                raise InvalidRequest(
                    f"watermark: '{wanted.watermark}' is of the gumbel scheme, which takes the place of chance; at "
                    "temperature 0 there is none, so nothing can be marked",
                    param="watermark",
                )
            sampling = msgspec.structs.replace(sampling, watermark=prepared.watermark)
        adapter = model.adapter_of(wanted.model)  # the last moment: until here it may have been unloaded
        stop_token_ids = set(self.options.stop_token_ids)
        if not self.options.ignore_eos:
            stop_token_ids.update(model.config.eos_token_ids)
        if self.options.min_tokens and sampling.allowed_ids and stop_token_ids.issuperset(sampling.allowed_ids):
            raise InvalidRequest(
                "allowed_token_ids: all of them end the answer, which must have min_tokens first",
                param="allowed_token_ids",
            )
        outputs = headers.resume.outputs() if headers.resume else {}
        self.priority = priority = headers.tenancy.priority_of(wanted.wished_priority())
        # A guide that the engine finds it cannot follow is an error of the field that brought it.
        self._guide_param = prepared.asked.param if prepared.asked is not None else None
        self._requests: list[Request] = []
        self._choices: dict[str, ChoiceText] = {}
        self._stream: TokenStream | None = None
        self._encoded: dict[str, list[Buffer]] = {}  # requests as the engine is sent them, by id, if that is done
        self._events_at_a_time = max(1, _WORK_AT_A_TIME // (1 + (sampling.num_logprobs or 0)))
        marks = calling.mark_ids if calling is not None else frozenset[int]()
        reasoning = prepared.reasoning
        self._reasons = reasoning is not None
        if reasoning is not None:
            marks |= model.special_ids(reasoning.format.marks)
            stop_token_ids |= model.special_ids(reasoning.format.stops) if not self.options.ignore_eos else frozenset()
        token_ids = sorted(stop_token_ids)
        is_skipping, is_explicit = self.options.skip_special_tokens, not prepared.cuts_output
        for place, prompt_ids in enumerate(prepared.prompts):
            engine_ids = prepared.engine_prompt(place)
            detokenizer = Detokenizer(
                model.tokenizer, prompt_ids=prompt_ids, skip_special_tokens=is_skipping, kept_ids=marks
            )
            for choice in range(self.options.n):
                index = len(self._requests)
                request = Request(
                    id=f"{request_id}-{index}",
                    prompt_ids=engine_ids,
                    max_tokens=model.fit_output(len(prompt_ids), self.options.max_tokens, is_explicit=is_explicit),
                    sampling=for_choice(sampling, choice),
                    stop_token_ids=token_ids,
                    min_tokens=self.options.min_tokens,
                    priority=priority,
                    namespace=cache_namespace(headers.namespace, self.options.namespace),
                    tenant=headers.tenancy.id,
                    weight=headers.tenancy.weight,
                    output_ids=outputs.pop(index, []),
                    guide=prepared.guide,
                    adapter=adapter,
                    is_resumed=headers.resume is not None,
                    kv_source=headers.kv_source,
                    predicted_ids=prepared.predicted_ids,
                    images=prepared.images,
                    thinking=prepared.thinking,
                )
                self._requests.append(request)
                self._choices[request.id] = ChoiceText(
                    index, detokenizer.copy(), model.tokenizer, prepared.stops, calling, reasoning
                )
        if headers.resume is not None:
            is_relayed = self.options.stream or (headers.is_relayed_whole and not self.has_logprobs)
            if outputs or not is_relayed:
                raise InvalidRequest("resume: this is not the request that the stream was for", param="resume")
            self._resume(headers.resume, vocab_size, replays=prepared.replays)

    def _resume(self, resume: Resume, vocab_size: int, *, replays: bool) -> None:
        last = resume.units[-1] if resume.units else None
        for index, request in enumerate(self._requests):
            known, text = request.output_ids, self._choices[request.id]
            check_token_ids(known, vocab_size, "resume")
            self.num_resumed_tokens += len(known)
            if not self.options.stream:
                text.resume([])
                if known:
                    self.resumed_whole.append(text.read_event(_replayed_event(request, known)))
            elif last is not None and last.choice == index and replays:
                text.resume([])
                earlier = [TokenEvent(request.id, unit.token_ids) for unit in resume.units[:-1]]
                self.resumed_pieces = [text.read_event(event) for event in earlier]
                self.replayed = text.read_event(_replayed_event(request, last.token_ids))
            elif last is not None and last.choice == index:
                self.resumed_parts[index] = text.resume(known[: len(known) - len(last.token_ids)])
                self.replayed = text.read_event(_replayed_event(request, last.token_ids))
            elif known:
                self.resumed_parts[index] = text.resume(known)
        self.num_cached_tokens = sum(u.cached_tokens for u in resume.units if u.choice % self.options.n == 0)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of output tokens that are thoughts; None: the model does not reason."""
        if not self._reasons:
            return None
        return sum(choice.num_reasoning_tokens for choice in self._choices.values())

    @property
    def answer_bytes(self) -> int:
        """The bytes of a whole answer, about; the prompts included, which it may repeat."""
        num_logprobs = self._requests[0].sampling.num_logprobs
        scored_bytes = 0 if num_logprobs is None else _SCORED_BYTES * (1 + num_logprobs)
        num_repeated = self.num_prompt_tokens * self.options.n
        if self.num_prompt_logprobs is not None:
            num_repeated *= 1 + _SCORED_BYTES * (1 + self.num_prompt_logprobs) // _TOKEN_BYTES
        return num_repeated * _TOKEN_BYTES + self.num_output_tokens * (_TOKEN_BYTES + scored_bytes)

    @property
    def has_logprobs(self) -> bool:
        return self._requests[0].sampling.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def usage(self) -> Usage:
        return Usage.of(
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.num_cached_tokens,
            self.num_reasoning_tokens,
            self.num_image_tokens,
        )

    @property
    def meter(self) -> Meter | None:
        """The meter of its cost; None: it has not begun."""
        return self._stream.meter if self._stream is not None else None

    @property
    def cost(self) -> Cost:
        """Its cost so far, of what was made here."""
        scoring = self.prompt_scores.cost if self.prompt_scores is not None else Cost()
        return self._stream.meter.cost + scoring if self._stream is not None else scoring

    @property
    def num_made_here(self) -> int:
        """Output tokens, without those that another replica made."""
        return self.num_output_tokens - self.num_resumed_tokens

    @property
    def resumed_texts(self) -> dict[int, bytes]:
        """The text before the next log probabilities of each choice, if another replica began them."""
        if not self.num_resumed_tokens or self._requests[0].sampling.num_logprobs is None:
            return {}
        return {index: text.resumed_text() for index, text in enumerate(self._choices.values())}

    def start(self, engine: EngineClient, *, max_open: int) -> None:
        if engine.num_open + self.num_choices > max_open:
            raise Overloaded(f"{engine.num_open} generations are open already", retry_after_s=1.0)
        open_requests = [request for request in self._requests if not self._is_over(request)]
        self._stream = engine.open(open_requests, self._encoded)
        self._engine = engine
        self._encoded = {}

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of all pixels that are to be sent to the engine."""
        return sum(len(image.values) for request in self._requests for image in request.images)

    def encode(self) -> None:
        """Makes ready what is too large to be encoded while others wait, and keeps nothing else of the pixels."""
        self._encoded = {request.id: encoded(request) for request in self._requests}
        self._requests = [msgspec.structs.replace(request, images=()) for request in self._requests]

    def give_back(self, error: PenstockError) -> None:
        """Ends the stream here and now; the error goes to its reader."""
        if self._stream is not None:
            self._stream.fail(error)

    async def pieces(self, clock: Clock) -> AsyncIterator[list[Piece]]:
        """The text of all choices as it comes: several pieces at a time where the reader is slower than the engine, but
        a bounded number, so that other requests have their turn before the rest of what is waiting."""
        assert self._stream is not None
        open_ids = {request.id for request in self._requests if not self._is_over(request)}
        waiting: deque[TokenEvent] = deque()
        while open_ids:
            if waiting:
                await asyncio.sleep(0)
            else:
                try:
                    waiting += await self._stream.next()
                except UnsupportedParameter as error:
                    if (param := self._guide_param) is None:
                        raise
                    raise UnsupportedParameter(f"{param}: {error.message}", param=param) from None
            pieces = []
            for _ in range(min(len(waiting), self._events_at_a_time)):
                event = waiting.popleft()
                if event.request_id not in open_ids:
                    continue  # a stop string ended it while more tokens were on the way
                if event.timings is not None and self.times.engine is None:
                    self.times.engine = event.timings
                piece = self._choices[event.request_id].read_event(event)
                if piece.index % self.options.n == 0:  # its siblings found the same prompt, which is counted once
                    self.num_cached_tokens += piece.cached_tokens
                if piece.finish is not None:
                    open_ids.discard(event.request_id)
                    self._engine.abort(event.request_id)
                pieces.append(piece)
            self.times.last_token_s = clock.now()
            if self.times.first_token_s is None:
                self.times.first_token_s = self.times.last_token_s
            if pieces:
                yield pieces

    def _is_over(self, request: Request) -> bool:
        """Whether another replica got to its end, if not to telling it, before it began here."""
        known = request.output_ids
        is_finished = bool(known) and request.finish_after(len(known), known[-1]) is not None
        return is_finished or self._choices[request.id].is_stopped

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()


def _replayed_event(request: Request, token_ids: list[int]) -> TokenEvent:
    """The event that another replica's engine gave for the last of a request's output. Its log probabilities are gone:
    those here only hold the place of what the client has."""
    known = request.output_ids
    finish = request.finish_after(len(known), known[-1]) if known else None
    has_logprobs = request.sampling.num_logprobs is not None
    return TokenEvent(request.id, token_ids, finish, [TokenLogprobs(0.0)] * len(token_ids) if has_logprobs else None)

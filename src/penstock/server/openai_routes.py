"""/v1/chat/completions, /v1/completions and /v1/models: read the request, run it, write the answer, note it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from penstock.api import sse
from penstock.api.asgi import Request, Route, Send, SseStream, json_response
from penstock.api.openai import (
    ChatChunks,
    Choice,
    CompletionChunks,
    CompletionRequest,
    GenerationRequest,
    ModelCard,
    ResponseHead,
    ScoredToken,
    chat_completion,
    model_list,
    model_object,
    new_id,
    parse_chat,
    parse_completion,
    text_completion,
)
from penstock.core.clock import Clock
from penstock.core.request import FinishReason
from penstock.engine.client import EngineClient
from penstock.server.choices import Piece
from penstock.server.generation import Generation, Times
from penstock.server.prompts import PromptEncoder
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel


class OpenAIRoutes:
    def __init__(
        self,
        model: ServedModel,
        engine: EngineClient,
        encoder: PromptEncoder,
        recorder: Recorder,
        clock: Clock,
        *,
        max_open: int,
        max_body_bytes: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._encoder = encoder
        self._recorder = recorder
        self._clock = clock
        self._max_open = max_open
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/chat/completions", self.chat),
            Route("POST", "/v1/completions", self.completions),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{model}", self.model),
        ]

    async def models(self, request: Request, send: Send) -> None:
        await json_response(send, 200, model_list([self._card()]))

    async def model(self, request: Request, send: Send) -> None:
        self._model.check_name(request.path_param)
        await json_response(send, 200, model_object(self._card()))

    async def chat(self, request: Request, send: Send) -> None:
        with self._recorder.request("chat", request.id) as record:
            times = Times(self._clock.now())
            wanted = parse_chat(await request.body(self._max_body_bytes))
            self._model.check_name(wanted.model)
            prompts = await self._encoder.chat(wanted)
            with self._generation(wanted, prompts, request, times) as generation:
                record.follow(generation)
                await request.while_connected(self._answer(send, wanted, generation, "chatcmpl", echoed=[""]))

    async def completions(self, request: Request, send: Send) -> None:
        with self._recorder.request("completions", request.id) as record:
            times = Times(self._clock.now())
            wanted = parse_completion(await request.body(self._max_body_bytes))
            self._model.check_name(wanted.model)
            prompts = await self._encoder.completion(wanted)
            echoed = [self._model.tokenizer.decode(ids) if wanted.echo else "" for ids in prompts]
            with self._generation(wanted, prompts, request, times) as generation:
                record.follow(generation)
                await request.while_connected(self._answer(send, wanted, generation, "cmpl", echoed=echoed))

    def _generation(
        self, wanted: GenerationRequest, prompts: list[list[int]], request: Request, times: Times
    ) -> Generation:
        times.tokenized_s = self._clock.now()
        # The client's id may repeat; what the engine calls the request must not.
        return Generation(wanted, prompts, self._model, new_id(request.id), times)

    async def _answer(
        self, send: Send, wanted: GenerationRequest, generation: Generation, kind: str, *, echoed: Sequence[str]
    ) -> None:
        generation.start(self._engine, max_open=self._max_open)
        head = ResponseHead(new_id(kind), self._model.name, int(time.time()))
        pieces = generation.pieces(self._clock)
        # The first news is awaited before a word is sent: until then a failure still has its own status.
        first = await anext(pieces)
        prefixes = [text for text in echoed for _ in range(generation.options.n)]
        if generation.options.stream:
            await self._stream(send, wanted, generation, head, first, pieces, prefixes)
        else:
            await self._respond(send, wanted, generation, head, first, pieces, prefixes)

    async def _stream(
        self,
        send: Send,
        wanted: GenerationRequest,
        generation: Generation,
        head: ResponseHead,
        first: list[Piece],
        rest: AsyncIterator[list[Piece]],
        prefixes: list[str],
    ) -> None:
        make = CompletionChunks if isinstance(wanted, CompletionRequest) else ChatChunks
        chunks = make(head, include_usage=generation.options.include_usage)
        async with SseStream(send) as stream:
            opening = [chunks.start(index) for index in range(generation.num_choices)]
            opening += [chunks.text(index, prefix) for index, prefix in enumerate(prefixes) if prefix]
            frames = [sse.event(chunk) for chunk in opening if chunk is not None]
            await stream.write(b"".join([*frames, _frames(chunks, first)]))
            async for pieces in rest:
                if frame := _frames(chunks, pieces):
                    await stream.write(frame)
            if generation.options.include_usage:
                await stream.write(sse.event(chunks.usage(generation.usage)))
            await stream.write(sse.DONE)

    async def _respond(
        self,
        send: Send,
        wanted: GenerationRequest,
        generation: Generation,
        head: ResponseHead,
        first: list[Piece],
        rest: AsyncIterator[list[Piece]],
        prefixes: list[str],
    ) -> None:
        texts = list(prefixes)
        finishes = [FinishReason.STOP] * len(texts)
        logprobs: list[list[ScoredToken] | None] = [None] * len(texts)
        gathered = list(first)
        async for pieces in rest:
            gathered += pieces
        for piece in gathered:
            texts[piece.index] += piece.text
            if piece.logprobs is not None:
                logprobs[piece.index] = [*(logprobs[piece.index] or []), *piece.logprobs]
            if piece.finish is not None:
                finishes[piece.index] = piece.finish
        choices = [Choice(i, *parts) for i, parts in enumerate(zip(texts, finishes, logprobs, strict=True))]
        make = text_completion if isinstance(wanted, CompletionRequest) else chat_completion
        await json_response(send, 200, make(head, choices, generation.usage))

    def _card(self) -> ModelCard:
        return ModelCard(id=self._model.name, created=self._model.created, max_model_len=self._model.max_model_len)


def _frames(chunks: ChatChunks | CompletionChunks, pieces: list[Piece]) -> bytes:
    frames = []
    for piece in pieces:
        if piece.text or piece.logprobs:
            frames.append(sse.event(chunks.text(piece.index, piece.text, piece.logprobs)))
        if piece.finish is not None:
            frames.append(sse.event(chunks.finish(piece.index, piece.finish)))
    return b"".join(frames)

"""/v1/chat/completions, /v1/completions and /v1/models: read the request, run it, write the answer, note it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.api.asgi import Request, Route, Send, json_response
from penstock.api.openai import (
    CompletionRequest,
    GenerationRequest,
    ModelCard,
    ResponseHead,
    model_list,
    model_object,
    new_id,
    parse_chat,
    parse_completion,
)
from penstock.core.clock import Clock
from penstock.engine.client import EngineClient
from penstock.server.answers import CHAT, COMPLETION, Answer, Form
from penstock.server.generation import Generation, Times
from penstock.server.prompts import PromptEncoder
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel

Wanted = TypeVar("Wanted", bound=GenerationRequest)


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

    async def chat(self, request: Request, send: Send) -> None:
        await self._generate(request, send, CHAT, parse_chat, self._encoder.chat)

    async def completions(self, request: Request, send: Send) -> None:
        await self._generate(request, send, COMPLETION, parse_completion, self._encoder.completion)

    async def models(self, request: Request, send: Send) -> None:
        await json_response(send, 200, model_list([self._card()]))

    async def model(self, request: Request, send: Send) -> None:
        self._model.check_name(request.path_param)
        await json_response(send, 200, model_object(self._card()))

    async def _generate(
        self,
        request: Request,
        send: Send,
        form: Form,
        parse: Callable[[bytes], Wanted],
        encode: Callable[[Wanted], Awaitable[list[list[int]]]],
    ) -> None:
        with self._recorder.request(form.route, request.id) as record:
            times = Times(self._clock.now())
            wanted = parse(await request.body(self._max_body_bytes))
            self._model.check_name(wanted.model)
            prompts = await encode(wanted)
            times.tokenized_s = self._clock.now()
            # The client's id may repeat; what the engine calls the request must not.
            with Generation(wanted, prompts, self._model, new_id(request.id), times) as generation:
                record.follow(generation)
                head = ResponseHead(new_id(form.id_prefix), self._model.name, int(time.time()))
                openings = [text for text in self._echo(wanted, prompts) for _ in range(generation.options.n)]
                generation.start(self._engine, max_open=self._max_open)
                answer = Answer(form, head, generation, openings)
                await request.while_connected(answer.write(send, generation.pieces(self._clock)))

    def _echo(self, wanted: GenerationRequest, prompts: list[list[int]]) -> list[str]:
        is_wanted = isinstance(wanted, CompletionRequest) and wanted.echo
        return [self._model.tokenizer.decode(prompt_ids) if is_wanted else "" for prompt_ids in prompts]

    def _card(self) -> ModelCard:
        return ModelCard(id=self._model.name, created=self._model.created, max_model_len=self._model.max_model_len)

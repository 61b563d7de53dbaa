"""/v1/chat/completions, /v1/completions and /v1/models."""

from __future__ import annotations

from functools import partial

from penstock.api.asgi import Request, Route
from penstock.api.openai import (
    GenerationRequest,
    ModelCard,
    ResponseHead,
    model_list,
    model_object,
    parse_chat,
    parse_completion,
)
from penstock.api.relay import Origin
from penstock.api.sink import Sink, json_response
from penstock.core.errors import InvalidRequest
from penstock.server.answers import CHAT, COMPLETION, CompletionAnswer, Form
from penstock.server.calling_answers import CallingChat
from penstock.server.exchange import Exchange, PreparedRequest
from penstock.server.gateway_headers import GatewayHeaders
from penstock.server.prompt_encoder import PromptEncoder
from penstock.server.served_model import ServedModel
from penstock.server.tool_calling import ToolCalling

_MAX_ECHOED = 8 << 20  # characters: an answer repeats the prompt once per choice


class OpenAIRoutes:
    def __init__(self, model: ServedModel, encoder: PromptEncoder, exchange: Exchange) -> None:
        self._model = model
        self._encoder = encoder
        self._exchange = exchange

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/chat/completions", self.chat),
            Route("POST", "/v1/completions", self.completions),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{model}", self.model),
        ]

    async def chat(self, request: Request, sink: Sink) -> None:
        await self._exchange.generate(request, sink, CHAT.route, self._read_chat)

    async def completions(self, request: Request, sink: Sink) -> None:
        await self._exchange.generate(request, sink, COMPLETION.route, self._read_completion)

    async def models(self, request: Request, sink: Sink) -> None:
        await json_response(
            sink, 200, model_list([self._card(name) for name in (self._model.name, *self._model.adapters)])
        )

    async def model(self, request: Request, sink: Sink) -> None:
        self._model.check_name(request.path_param)
        await json_response(sink, 200, model_object(self._card(request.path_param)))

    def _read_chat(self, incoming: GatewayHeaders) -> PreparedRequest:
        wanted = parse_chat(incoming.body)
        self._model.check_name(wanted.model)
        prompts = self._encoder.chat(wanted, incoming.prompt_ids)
        calling = ToolCalling.of(wanted, self._model)
        if calling is None:
            return self._ask(CHAT, incoming.origin, wanted, prompts)
        return PreparedRequest(
            wanted, prompts, partial(CallingChat, self._head(CHAT, incoming.origin, wanted)), calling.guide, calling
        )

    def _read_completion(self, incoming: GatewayHeaders) -> PreparedRequest:
        wanted = parse_completion(incoming.body)
        self._model.check_name(wanted.model)
        prompts = self._encoder.completion(wanted, incoming.prompt_ids)
        echoed = [self._model.tokenizer.decode(prompt_ids) for prompt_ids in prompts] if wanted.echo else None
        if sum(map(len, echoed or ())) * (wanted.n or 1) > _MAX_ECHOED:
            raise InvalidRequest(
                f"echo: the prompts of all choices have more than {_MAX_ECHOED} characters", param="echo"
            )
        return self._ask(COMPLETION, incoming.origin, wanted, prompts, echoed)

    def _ask(
        self,
        form: Form,
        origin: Origin,
        wanted: GenerationRequest,
        prompts: list[list[int]],
        echoed: list[str] | None = None,
    ) -> PreparedRequest:
        openings = [text for text in echoed or [""] * len(prompts) for _ in range(wanted.n or 1)]
        return PreparedRequest(
            wanted, prompts, partial(CompletionAnswer, form, self._head(form, origin, wanted), openings)
        )

    def _head(self, form: Form, origin: Origin, wanted: GenerationRequest) -> ResponseHead:
        return ResponseHead(f"{form.id_prefix}-{origin.id}", wanted.model, origin.created)

    def _card(self, name: str) -> ModelCard:
        model, adapter = self._model, self._model.adapters.get(name)
        if adapter is None:
            return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len)
        return ModelCard(
            id=name, created=adapter.created, max_model_len=model.max_model_len, root=adapter.path, parent=model.name
        )

"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

import msgspec

from penstock.api.anthropic import MessageHead, MessagesRequest, parse_count_tokens, parse_messages, token_count
from penstock.api.asgi import Request, Route
from penstock.api.errors import ANTHROPIC
from penstock.api.sink import Sink, json_response
from penstock.core.errors import ContextLengthExceeded
from penstock.server.anthropic_answer import MessageAnswer
from penstock.server.calling_answers import CallingMessage
from penstock.server.exchange import Exchange, PreparedRequest
from penstock.server.gateway_headers import GatewayHeaders
from penstock.server.prompt_encoder import PromptEncoder
from penstock.server.served_model import ServedModel
from penstock.server.tool_calling import ToolCalling


class AnthropicRoutes:
    def __init__(self, model: ServedModel, encoder: PromptEncoder, exchange: Exchange) -> None:
        self._model = model
        self._encoder = encoder
        self._exchange = exchange

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/messages", self.messages, ANTHROPIC),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens, ANTHROPIC),
        ]

    async def messages(self, request: Request, sink: Sink) -> None:
        await self._exchange.generate(request, sink, "messages", self._read)

    async def count_tokens(self, request: Request, sink: Sink) -> None:
        body = await self._exchange.reply(request, "count_tokens", self._count)
        await json_response(sink, 200, body)

    def _read(self, incoming: GatewayHeaders) -> PreparedRequest:
        wanted = parse_messages(incoming.body)
        self._model.check_name(wanted.model)
        chat = wanted.to_chat()
        prompts = self._encoder.chat(chat, incoming.prompt_ids)
        chat = msgspec.structs.replace(chat, max_tokens=self._fit_output(wanted, len(prompts[0])))
        head = MessageHead(f"msg_{incoming.origin.id}", wanted.model)
        calling = ToolCalling.of(chat, self._model)
        if calling is None:
            return PreparedRequest(chat, prompts, partial(MessageAnswer, head, wanted.max_tokens), wanted.guide())
        return PreparedRequest(chat, prompts, partial(CallingMessage, head, wanted.max_tokens), calling.guide, calling)

    def _count(self, body: bytes) -> bytes:
        wanted = parse_count_tokens(body)
        self._model.check_name(wanted.model)
        return token_count(self._encoder.count_chat(wanted.to_chat()))

    def _fit_output(self, wanted: MessagesRequest, num_prompt_tokens: int) -> int:
        """Clients of this API must name a limit and often name a high one: it is cut to what the prompt leaves, and an
        answer that ends there says so. More than the model can ever hold is refused."""
        longest = self._model.max_model_len
        if wanted.max_tokens > longest:
            raise ContextLengthExceeded(
                f"max_tokens: {wanted.max_tokens} is more than this model's context of {longest} tokens",
                param="max_tokens",
            )
        return self._model.fit_output(num_prompt_tokens, wanted.max_tokens, is_explicit=False)

"""/tokenize, /detokenize and /v1/chat/completions/render: what a prompt becomes. The engine is not asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.api.asgi import Request, Route
from penstock.api.openai import ChatRequest, check_token_ids, parse_chat
from penstock.api.sink import Sink, json_response
from penstock.api.tokenization import (
    DETOKENIZE_PATHS,
    RENDER_PATH,
    TOKENIZE_PATHS,
    detokenized,
    parse_detokenize,
    parse_tokenize,
    rendered,
    tokenized,
)
from penstock.core.errors import UnsupportedParameter
from penstock.server.offload import Offload
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel
from penstock.server.text_limits import MAX_CONTEXTS
from penstock.text.prompt_encoder import kept_ids, render


class TokenRoutes:
    def __init__(self, model: ServedModel, recorder: Recorder, offload: Offload, *, max_body_bytes: int) -> None:
        self._model = model
        self._recorder = recorder
        self._offload = offload
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        tokenize = partial(self._serve, "tokenize", self._tokenize)
        detokenize = partial(self._serve, "detokenize", self._detokenize)
        return [
            *(Route("POST", path, tokenize) for path in TOKENIZE_PATHS),
            *(Route("POST", path, detokenize) for path in DETOKENIZE_PATHS),
            Route("POST", RENDER_PATH, partial(self._serve, "render", self._render)),
        ]

    async def _serve(self, route: str, answer: Callable[[bytes], bytes], request: Request, sink: Sink) -> None:
        with self._recorder.request(route, request.id, request.convention):
            body = await request.body(self._max_body_bytes)
            found = await self._offload.run(len(body), partial(answer, body))
        await json_response(sink, 200, found)

    def _tokenize(self, body: bytes) -> bytes:
        wanted, model = parse_tokenize(body), self._model
        if wanted.model is not None:
            model.check_name(wanted.model)
        chat, param = wanted.chat(), "prompt" if wanted.messages is None else "messages"
        if chat is not None:
            _check_shows_none(chat)
        text = wanted.prompt or "" if chat is None else render(model.chat_template, chat)
        model.check_prompt_text(text, param, contexts=MAX_CONTEXTS)
        ids = model.tokenizer.encode(text, add_special_tokens=wanted.adds_special_tokens())
        strings = [model.tokenizer.vocabulary_text(one) for one in ids] if wanted.return_token_strs else None
        return tokenized(ids, model.max_model_len, strings)

    def _detokenize(self, body: bytes) -> bytes:
        wanted, model = parse_detokenize(body), self._model
        if wanted.model is not None:
            model.check_name(wanted.model)
        check_token_ids(wanted.tokens, model.config.vocab_size, "tokens")
        return detokenized(model.tokenizer.decode(wanted.tokens, skip_special_tokens=False))

    def _render(self, body: bytes) -> bytes:
        """The prompt of a chat, also if the context could not hold it."""
        wanted, model = parse_chat(body), self._model
        model.check_generates()
        model.check_name(wanted.model)
        _check_shows_none(wanted)
        text = render(model.chat_template, wanted)
        model.check_prompt_text(text, "messages", contexts=MAX_CONTEXTS)
        encoded, keep_last = model.tokenizer.encode(text, add_special_tokens=False), wanted.truncate_prompt_tokens
        ids = kept_ids(encoded, keep_last=keep_last, bos_token_id=model.config.bos_token_id, param="messages")
        if ids != encoded:
            text = model.tokenizer.decode(ids, skip_special_tokens=False)
        return rendered(wanted.model, text, ids)


def _check_shows_none(chat: ChatRequest) -> None:
    """Tokens of images have no text, and ids that are no tokenizer's."""
    if images := chat.images():
        path = images[0].path
        raise UnsupportedParameter(f"{path}: images are not taken here; count_tokens counts theirs", param=path)

"""/v1/chat/completions and /v1/completions, how their bodies are parsed and their answers written; and /v1/models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import msgspec

from penstock.api import sse
from penstock.api.asgi import Request, Route
from penstock.api.openai import (
    Call,
    ChatChunks,
    Choice,
    CompletionChunks,
    CompletionRequest,
    ModelCard,
    ResponseHead,
    ScoredToken,
    chat_completion,
    model_list,
    model_object,
    named_by_id,
    parse_chat,
    parse_completion,
    text_completion,
)
from penstock.api.openai.generation import SERVICE_TIERS
from penstock.api.sink import Sink, json_response
from penstock.core.errors import PenstockError
from penstock.core.request import FinishReason
from penstock.server.choices import Piece
from penstock.server.generation import Generation
from penstock.server.pipeline import Api, Pipeline, Writer
from penstock.server.prepare import ParsedRequest, PreparedRequest
from penstock.server.served_model import ServedModel
from penstock.server.tool_calling import WholeCall, joined_parts
from penstock.text.tools import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text


class CompletionWriter:
    """text_completion objects, and what chats have in common with them."""

    _ID_PREFIX = "cmpl"
    _whole = staticmethod(text_completion)

    def __init__(self, prepared: PreparedRequest, generation: Generation) -> None:
        origin, wanted = prepared.headers.origin, prepared.wanted
        tier = None if wanted.service_tier is None else SERVICE_TIERS[generation.priority]
        self._head = ResponseHead(f"{self._ID_PREFIX}-{origin.id}", wanted.model, origin.created, tier)
        self._prepared = prepared
        self._generation = generation

    def opening(self) -> list[bytes]:
        scored, events = self._echoed_scores, []
        for index, text in enumerate(self._echoed):
            if (started := self._completion_chunks.start(index, self._prompt_ids(index))) is not None:
                events.append(sse.event(started))
            if text or scored[index]:
                events.append(sse.event(self._chunks.text(index, text, scored[index])))
        return events

    def events(self, piece: Piece) -> list[bytes]:
        events = self._ids_event(piece)
        if piece.text or piece.logprobs:
            events.append(sse.event(self._chunks.text(piece.index, piece.text, self._named(piece.logprobs))))
        if piece.finish is not None:
            events.append(sse.event(self._chunks.finish(piece.index, piece.finish)))
        return events

    def closing(self) -> list[bytes]:
        usage = self._chunks.usage(self._generation.usage) if self._generation.options.include_usage else None
        return [sse.event(usage), sse.DONE] if usage is not None else [sse.DONE]

    def whole(self, pieces: list[Piece]) -> bytes:
        by_choice: list[list[Piece]] = [[] for _ in range(self._generation.num_choices)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = [self._choice(index, found) for index, found in enumerate(by_choice)]
        return self._whole(self._head, self._shown(choices), self._generation.usage)

    def failure(self, error: PenstockError) -> list[bytes]:
        return []

    def _choice(self, index: int, pieces: list[Piece]) -> Choice:
        text = self._echoed[index] + "".join(piece.text for piece in pieces)
        scored = self._logprobs(pieces)
        if scored is not None:
            scored = [*(self._echoed_scores[index] or ()), *scored]
        return Choice(index, text, pieces[-1].finish or FinishReason.STOP, scored, **self._asked_for(index, pieces))

    def _asked_for(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Members of a choice that are there if they are asked for by name."""
        prompt_ids = self._prompt_ids(index)
        ids = None if prompt_ids is None else [token_id for piece in pieces for token_id in piece.token_ids]
        return {"prompt_logprobs": self._prompt_logprobs(index), "prompt_ids": prompt_ids, "token_ids": ids}

    def _logprobs(self, pieces: list[Piece]) -> list[ScoredToken] | None:
        if all(piece.logprobs is None for piece in pieces):
            return None
        return self._named([token for piece in pieces for token in piece.logprobs or ()])

    def _named(self, tokens: list[ScoredToken] | None) -> list[ScoredToken] | None:
        """Tokens under their ids, where these are wanted in place of texts."""
        return named_by_id(tokens) if tokens and self._prepared.wanted.return_tokens_as_token_ids else tokens

    def _prompt_ids(self, index: int) -> list[int] | None:
        if not self._prepared.wanted.return_token_ids:
            return None
        return self._prepared.prompts[index // self._generation.options.n]

    def _ids_event(self, piece: Piece) -> list[bytes]:
        if not self._prepared.wanted.return_token_ids or not piece.token_ids:
            return []
        return [sse.event(self._chunks.ids(piece.index, piece.token_ids))]

    def _shown(self, choices: list[Choice]) -> list[Choice]:
        """The best of each prompt's choices by their log probability per token, if there are more than are wanted."""
        wanted = self._prepared.wanted
        if not isinstance(wanted, CompletionRequest) or not wanted.is_chosen():
            return choices
        made, found = self._generation.options.n, list[Choice]()
        for begin in range(0, len(choices), made):
            best = sorted(choices[begin : begin + made], key=self._mean_logprob, reverse=True)
            found += best[: wanted.n or 1]
        hidden = {"logprobs": None} if wanted.logprobs is None else {}
        return [msgspec.structs.replace(choice, index=index, **hidden) for index, choice in enumerate(found)]

    def _mean_logprob(self, choice: Choice) -> float:
        """The mean of the answer's own tokens; one without any comes last."""
        made = (choice.logprobs or ())[len(self._echoed_scores[choice.index] or ()) :]
        known = [token.logprob for token in made if token.logprob is not None]
        return sum(known) / len(known) if known else -math.inf

    def _prompt_logprobs(self, index: int) -> list[ScoredToken] | None:
        """Prompt's log probabilities, if asked for by that name, with as many alternatives as are asked for there."""
        num_top = self._prepared.wanted.prompt_logprobs
        return None if num_top is None else self._prompt_scores(index, num_top)

    def _prompt_scores(self, index: int, num_top: int) -> list[ScoredToken]:
        scores = self._generation.prompt_scores
        assert scores is not None
        own = scores.prompts[index // self._generation.options.n]
        return [msgspec.structs.replace(token, top=token.top[:num_top]) for token in own]

    @cached_property
    def _echoed_scores(self) -> list[list[ScoredToken] | None]:
        """Log probabilities of the prompt that each choice begins with, if it does and they are asked for."""
        wanted, num_choices = self._prepared.wanted, self._generation.num_choices
        if not isinstance(wanted, CompletionRequest) or not wanted.echo or wanted.logprobs is None:
            return [None] * num_choices
        return [
            self._named(_as_echoed(self._prompt_scores(index, wanted.logprobs), self._echoed[index]))
            for index in range(num_choices)
        ]

    @cached_property
    def _echoed(self) -> list[str]:
        """The prompt of each choice, if its text is to begin with it."""
        echoed, generation = self._prepared.echoed, self._generation
        if echoed is None:
            return [""] * generation.num_choices
        return [text for text in echoed for _ in range(generation.options.n)]

    def _usage_options(self) -> dict[str, Any]:
        generation = self._generation
        usage_now = (lambda: generation.usage) if generation.options.continuous_usage else None
        return {"include_usage": generation.options.include_usage, "usage_now": usage_now}

    @property
    def _chunks(self) -> ChatChunks | CompletionChunks:
        return self._completion_chunks

    @cached_property
    def _completion_chunks(self) -> CompletionChunks:
        chunks = CompletionChunks(self._head, **self._usage_options())
        for index, text in self._generation.resumed_texts.items():
            is_echoed = self._echoed_scores[index] is not None
            chunks.resume(index, (self._echoed[index].encode() if is_echoed else b"") + text)
        return chunks


class ChatWriter(CompletionWriter):
    """chat.completion objects of text alone."""

    _ID_PREFIX = "chatcmpl"
    _whole = staticmethod(chat_completion)

    @property
    def _first_text(self) -> str | None:
        return ""

    def opening(self) -> list[bytes]:
        started = [
            self._chunks.start(index, self._first_text, self._prompt_ids(index) if index == 0 else None)
            for index in range(self._generation.num_choices)
        ]
        return [sse.event(chunk) for chunk in started]

    @cached_property
    def _chunks(self) -> ChatChunks:
        return ChatChunks(self._head, **self._usage_options())


class PartsChatWriter(ChatWriter):
    """chat.completion objects whose answers may hold thoughts, or calls of tools."""

    @property
    def _first_text(self) -> str | None:
        return "" if self._prepared.calling is None else None

    def events(self, piece: Piece) -> list[bytes]:
        found, logprobs = [], self._named(piece.logprobs)
        for part in piece.parts or ():
            if (chunk := self._chunk(piece.index, part, logprobs)) is not None:
                found.append(chunk)
                logprobs = None
        if logprobs:  # of tokens whose text is held back
            found.append(self._chunks.text(piece.index, "", logprobs))
        if piece.finish is not None:
            found.append(self._chunks.finish(piece.index, "tool_calls" if piece.is_calling else piece.finish))
        return self._ids_event(piece) + [sse.event(chunk) for chunk in found]

    def _choice(self, index: int, pieces: list[Piece]) -> Choice:
        blocks, last = joined_parts(part for piece in pieces for part in piece.parts or ()), pieces[-1]
        return Choice(
            index,
            "".join(block.text for block in blocks if isinstance(block, Text)),
            "tool_calls" if last.is_calling else last.finish or FinishReason.STOP,
            self._logprobs(pieces),
            [self._call(index, block) for block in blocks if isinstance(block, WholeCall)],
            "".join(block.text for block in blocks if isinstance(block, ReasoningText)) or None,
            **self._asked_for(index, pieces),
        )

    def _call(self, index: int, called: WholeCall) -> Call:
        assert self._prepared.calling is not None
        call_id = self._prepared.calling.format.call_id("call_", self._head.id, index, called.number)
        return Call(call_id, called.name, called.arguments)

    def _chunk(self, index: int, part: Part, logprobs: Sequence[ScoredToken] | None) -> bytes | None:
        match part:
            case Text(text):
                return self._chunks.text(index, text, logprobs)
            case ReasoningText(text):
                return self._chunks.thought(index, text, logprobs)
            case CallBegun(number, name):
                return self._chunks.call(index, number, self._call(index, WholeCall(number, name)), logprobs)
            case CallArguments(number, text):
                return self._chunks.arguments(index, number, text, logprobs)
            case CallEnded():
                return None


def _as_echoed(tokens: list[ScoredToken], text: str) -> list[ScoredToken]:
    """Tokens of a prompt as its text shows them: a first space that is the tokenizer's own mark is no part of it."""
    first = next((at for at, token in enumerate(tokens) if token.is_shown and token.raw), None)
    if first is not None and tokens[first].raw.startswith(b" ") and not text.startswith(" "):
        tokens[first] = msgspec.structs.replace(tokens[first], raw=tokens[first].raw[1:])
    return tokens


def _parse_chat(body: bytes) -> ParsedRequest:
    return ParsedRequest(parse_chat(body))


def _chat_writer(prepared: PreparedRequest, generation: Generation) -> Writer:
    has_parts = prepared.calling is not None or prepared.reasoning is not None
    return (PartsChatWriter if has_parts else ChatWriter)(prepared, generation)


def _parse_completion(body: bytes) -> ParsedRequest:
    wanted = parse_completion(body)
    return ParsedRequest(wanted, cuts_output=wanted.max_tokens is None)


CHAT = Api("chat", _parse_chat, _chat_writer)
COMPLETIONS = Api("completions", _parse_completion, CompletionWriter)


def routes(pipeline: Pipeline, model: ServedModel) -> list[Route]:
    return [
        Route("POST", "/v1/chat/completions", partial(pipeline.generate, CHAT)),
        Route("POST", "/v1/completions", partial(pipeline.generate, COMPLETIONS)),
        Route("GET", "/v1/models", partial(_models, model)),
        Route("GET", "/v1/models/{model}", partial(_model, model)),
    ]


async def _models(model: ServedModel, request: Request, sink: Sink) -> None:
    await json_response(sink, 200, model_list([_card(model, name) for name in (model.name, *model.adapters)]))


async def _model(model: ServedModel, request: Request, sink: Sink) -> None:
    model.check_name(request.path_param)
    await json_response(sink, 200, model_object(_card(model, request.path_param)))


def _card(model: ServedModel, name: str) -> ModelCard:
    adapter = model.adapters.get(name)
    if adapter is None:
        return ModelCard(id=model.name, created=model.created, max_model_len=model.max_model_len, root=model.name)
    return ModelCard(
        id=name, created=adapter.created, max_model_len=model.max_model_len, root=adapter.path, parent=model.name
    )

"""/v1/responses: how its bodies are parsed and responses written.

A replica keeps no responses: what a store is needed for is refused, unless a gateway has done it.
"""

from __future__ import annotations

from functools import cached_property, partial

from penstock.api.asgi import Route
from penstock.api.openai import ScoredToken
from penstock.api.responses import ResponseEvents, ResponseHead, ResponsesRequest, Usage, parse_responses
from penstock.core.errors import PenstockError, UnsupportedParameter
from penstock.core.request import FinishReason
from penstock.server.choices import Piece
from penstock.server.generation import Generation
from penstock.server.pipeline import Api, Pipeline
from penstock.server.prepare import ParsedRequest, PreparedRequest
from penstock.text.tools import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text


class ResponseWriter:
    def __init__(self, prepared: PreparedRequest, generation: Generation) -> None:
        origin, request = prepared.headers.origin, prepared.original
        assert isinstance(request, ResponsesRequest)
        self._head = ResponseHead(origin.id, origin.created)
        self._request = request
        self._prepared = prepared
        self._generation = generation
        self._scores: list[ScoredToken] = []  # of tokens whose text was not told yet

    def opening(self) -> list[bytes]:
        return self._events.opening()

    def events(self, piece: Piece) -> list[bytes]:
        return self._write(self._events, piece)

    def closing(self) -> list[bytes]:
        return []

    def whole(self, pieces: list[Piece]) -> bytes:
        for piece in pieces:
            self.events(piece)
        return self._events.whole

    def failure(self, error: PenstockError) -> list[bytes]:
        return self._events.fail(error, self._usage())

    @cached_property
    def _events(self) -> ResponseEvents:
        """The events as they are after what another replica sent."""
        events = ResponseEvents(self._head, self._request)
        if self._generation.replayed is not None:
            events.opening()
            for piece in self._generation.resumed_pieces:
                self._write(events, piece)
        return events

    def _write(self, events: ResponseEvents, piece: Piece) -> list[bytes]:
        """Log probabilities go with the next text, since that of their tokens may be held back."""
        self._scores += piece.logprobs or ()
        found: list[bytes] = []
        for part in _parts(piece):
            match part:
                case Text(text):
                    found += events.text(text, self._scores)
                    self._scores = []
                case ReasoningText(text):
                    found += events.reasoning(text)
                    self._scores = []
                case CallBegun(number, name):
                    found += events.call(self._call_id(number), name)
                case CallArguments(_, text):
                    found += events.arguments(text)
                case CallEnded():
                    found += events.end_item()
        if piece.finish is not None:
            is_cut = piece.finish is FinishReason.LENGTH
            found += events.finish(self._usage(), incomplete="max_output_tokens" if is_cut else None)
        return found

    def _usage(self) -> Usage:
        generation = self._generation
        return Usage.of(
            generation.num_prompt_tokens,
            generation.num_output_tokens,
            generation.num_cached_tokens,
            generation.num_reasoning_tokens or 0,
            generation.num_image_tokens,
        )

    def _call_id(self, number: int) -> str:
        assert self._prepared.calling is not None
        return self._prepared.calling.format.call_id("call_", self._head.id, number)


def _parts(piece: Piece) -> list[Part]:
    if piece.parts is not None:
        return piece.parts
    return [Text(piece.text)] if piece.text else []


def _parse(body: bytes) -> ParsedRequest:
    """An output limit above what the prompt leaves is cut: the response then says that it is incomplete."""
    request = parse_responses(body)
    return ParsedRequest(
        request.to_chat(),
        request.guide(),
        cuts_output=True,
        drops_turns=request.drops_turns,
        original=request,
        replays=True,
    )


def _check(prepared: PreparedRequest) -> None:
    """Refuses what a store is needed for. A gateway that has one sends `kept` instead."""
    request = prepared.original
    assert isinstance(request, ResponsesRequest)
    for name in ("previous_response_id", "background", "store"):
        if getattr(request, name):
            raise UnsupportedParameter(
                f"{name}: this is a replica, which keeps no responses; ask a gateway in front of it", param=name
            )


RESPONSES = Api("responses", _parse, ResponseWriter, _check)


def routes(pipeline: Pipeline) -> list[Route]:
    return [Route("POST", "/v1/responses", partial(pipeline.generate, RESPONSES))]

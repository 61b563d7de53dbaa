"""/v1/messages and /v1/messages/count_tokens: how their bodies are parsed, and messages written."""

from __future__ import annotations

from functools import cached_property, partial

from penstock.api.anthropic import (
    MessageHead,
    Stop,
    Usage,
    events,
    message,
    parse_count_tokens,
    parse_messages,
    token_count,
)
from penstock.api.anthropic.events import Blocks
from penstock.api.anthropic.responses import Block as ContentBlock
from penstock.api.anthropic.responses import text_block, thinking_block, tool_use_block
from penstock.api.asgi import Route
from penstock.api.errors import ANTHROPIC
from penstock.api.openai import ChatRequest
from penstock.core.errors import PenstockError
from penstock.core.request import FinishReason
from penstock.server.choices import Piece
from penstock.server.generation import Generation
from penstock.server.pipeline import Api, Pipeline, Writer
from penstock.server.prepare import ParsedRequest, PreparedRequest
from penstock.server.tool_calling import Block, WholeCall, joined_parts
from penstock.text.tools import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text


class MessageWriter:
    """Messages of one block of text."""

    def __init__(self, prepared: PreparedRequest, generation: Generation) -> None:
        self._head = MessageHead(f"msg_{prepared.headers.origin.id}", prepared.wanted.model)
        self._prepared = prepared
        self._generation = generation

    def opening(self) -> list[bytes]:
        return events.start(self._head, self._usage())

    def events(self, piece: Piece) -> list[bytes]:
        text = [events.text(piece.text)] if piece.text else []
        return text if piece.finish is None else text + events.end(self._stop(piece), self._usage())

    def closing(self) -> list[bytes]:
        return []

    def whole(self, pieces: list[Piece]) -> bytes:
        text = "".join(piece.text for piece in pieces)
        return message(self._head, [text_block(text)], self._stop(pieces[-1]), self._usage())

    def failure(self, error: PenstockError) -> list[bytes]:
        return []

    def _usage(self) -> Usage:
        generation = self._generation
        return Usage.of(generation.num_prompt_tokens, generation.num_output_tokens, generation.num_cached_tokens)

    def _stop(self, last: Piece) -> Stop:
        if last.stop is not None:
            return Stop("stop_sequence", last.stop)
        if last.finish is not FinishReason.LENGTH:
            return Stop("end_turn")
        limit = self._generation.options.max_tokens  # the client's own; the prompt may leave less
        is_at_limit = limit is not None and self._generation.num_output_tokens >= limit
        return Stop("max_tokens" if is_at_limit else "model_context_window_exceeded")


class BlocksWriter(MessageWriter):
    """Messages whose blocks are thoughts, text and calls of tools."""

    def opening(self) -> list[bytes]:
        return events.start_empty(self._head, self._usage())

    def events(self, piece: Piece) -> list[bytes]:
        found = [event for part in piece.parts or () for event in self._write(self._blocks, part)]
        if piece.finish is not None:
            found += [*self._blocks.close(), *events.end_empty(self._stop(piece), self._usage())]
        return found

    def whole(self, pieces: list[Piece]) -> bytes:
        found = joined_parts(part for piece in pieces for part in piece.parts or ())
        blocks = [self._block(at, block) for at, block in enumerate(found)]
        return message(self._head, blocks, self._stop(pieces[-1]), self._usage())

    def _block(self, at: int, block: Block) -> ContentBlock:
        match block:
            case Text(text):
                return text_block(text.lstrip("\n") if at else text)
            case ReasoningText(text):
                return thinking_block(text, self._sign(text))
            case WholeCall(number, name, arguments):
                return tool_use_block(self._call_id(number), name, arguments)

    def _sign(self, thought: str) -> str:
        return ""

    def _stop(self, last: Piece) -> Stop:
        return Stop("tool_use") if last.is_calling else super()._stop(last)

    def _call_id(self, number: int) -> str:
        assert self._prepared.calling is not None
        return self._prepared.calling.format.call_id("toolu_", self._head.id, number)

    def _write(self, blocks: Blocks, part: Part) -> list[bytes]:
        match part:
            case Text(text):
                return blocks.text(text)
            case ReasoningText(text):
                return blocks.thought(text)
            case CallBegun(number, name):
                return blocks.call(self._call_id(number), name)
            case CallArguments(_, text):
                return blocks.arguments(text)
            case CallEnded():
                return blocks.close()

    @cached_property
    def _blocks(self) -> Blocks:
        """The blocks as they are after what another replica sent."""
        blocks = Blocks(self._sign)
        for part in self._generation.resumed_parts.get(0, ()):
            self._write(blocks, part)
        return blocks


def _parse(body: bytes) -> ParsedRequest:
    """Clients of this API must name a limit and often name a high one: it is cut to what the prompt leaves, and an
    answer that ends there says so."""
    wanted = parse_messages(body)
    return ParsedRequest(wanted.to_chat(), wanted.guide(), cuts_output=True)


def _parse_counted(body: bytes) -> ChatRequest:
    return parse_count_tokens(body).to_chat()


def _writer(prepared: PreparedRequest, generation: Generation) -> Writer:
    has_parts = prepared.calling is not None or prepared.reasoning is not None
    return (BlocksWriter if has_parts else MessageWriter)(prepared, generation)


MESSAGES = Api("messages", _parse, _writer)


def routes(pipeline: Pipeline) -> list[Route]:
    count_tokens = partial(pipeline.count_tokens, _parse_counted, token_count)
    return [
        Route("POST", "/v1/messages", partial(pipeline.generate, MESSAGES), ANTHROPIC),
        Route("POST", "/v1/messages/count_tokens", count_tokens, ANTHROPIC),
    ]

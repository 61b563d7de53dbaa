"""Answers as OpenAI's clients read them: a stream of chunks or whole, in the form of their endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.api import sse
from penstock.api.openai import (
    ChatChunks,
    Choice,
    CompletionChunks,
    ResponseHead,
    ScoredToken,
    Usage,
    chat_completion,
    text_completion,
)
from penstock.core.request import FinishReason
from penstock.server.choices import Piece
from penstock.server.generation import Generation


@dataclass(frozen=True)
class Form:
    """What differs between the endpoints."""

    route: str
    id_prefix: str
    chunks: type[ChatChunks] | type[CompletionChunks]
    whole: Callable[[ResponseHead, Sequence[Choice], Usage], bytes]


CHAT = Form("chat", "chatcmpl", ChatChunks, chat_completion)
COMPLETION = Form("completions", "cmpl", CompletionChunks, text_completion)


@dataclass(frozen=True)
class CompletionAnswer:
    form: Form
    head: ResponseHead
    openings: list[str]  # what the text of each choice begins with: the prompt, if it is to be echoed
    generation: Generation

    def opening(self) -> list[bytes]:
        chunks = [self._chunks.start(index) for index in range(len(self.openings))]
        chunks += [self._chunks.text(index, opening) for index, opening in enumerate(self.openings) if opening]
        return [sse.event(chunk) for chunk in chunks if chunk is not None]

    def events(self, piece: Piece) -> list[bytes]:
        events = []
        if piece.text or piece.logprobs:
            events.append(sse.event(self._chunks.text(piece.index, piece.text, piece.logprobs)))
        if piece.finish is not None:
            events.append(sse.event(self._chunks.finish(piece.index, piece.finish)))
        return events

    def closing(self) -> list[bytes]:
        usage = [sse.event(self._chunks.usage(self.generation.usage))] if self.generation.options.include_usage else []
        return [*usage, sse.DONE]

    def whole(self, pieces: list[Piece]) -> bytes:
        by_choice = grouped(pieces, len(self.openings))
        choices = [_whole_choice(index, opening, by_choice[index]) for index, opening in enumerate(self.openings)]
        return self.form.whole(self.head, choices, self.generation.usage)

    @cached_property
    def _chunks(self) -> ChatChunks | CompletionChunks:
        chunks = self.form.chunks(self.head, include_usage=self.generation.options.include_usage)
        for index, num_characters in self.generation.resumed_characters.items():
            chunks.resume(index, num_characters)
        return chunks


def grouped(pieces: list[Piece], num_choices: int) -> list[list[Piece]]:
    """The pieces of each choice."""
    found: list[list[Piece]] = [[] for _ in range(num_choices)]
    for piece in pieces:
        found[piece.index].append(piece)
    return found


def _whole_choice(index: int, opening: str, pieces: list[Piece]) -> Choice:
    logprobs: list[ScoredToken] = [token for piece in pieces for token in piece.logprobs or ()]
    has_logprobs = any(piece.logprobs is not None for piece in pieces)
    finish = pieces[-1].finish or FinishReason.STOP
    text = opening + "".join(piece.text for piece in pieces)
    return Choice(index, text, finish, logprobs if has_logprobs else None)

"""How an answer is written: as a stream of chunks or whole, in the form of its endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from penstock.api import sse
from penstock.api.asgi import Send, SseStream, json_response
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
class Answer:
    form: Form
    head: ResponseHead
    generation: Generation
    openings: list[str]  # what the text of each choice begins with: the prompt, if it is to be echoed

    async def write(self, send: Send, pieces: AsyncIterator[list[Piece]]) -> None:
        # The first news is awaited before a word is sent: until then a failure still has its own status.
        first = await anext(pieces)
        if self.generation.options.stream:
            await self._stream(send, first, pieces)
        else:
            await self._respond(send, first, pieces)

    async def _stream(self, send: Send, first: list[Piece], rest: AsyncIterator[list[Piece]]) -> None:
        include_usage = self.generation.options.include_usage
        chunks = self.form.chunks(self.head, include_usage=include_usage)
        async with SseStream(send) as stream:
            starts = [chunks.start(index) for index in range(len(self.openings))]
            starts += [chunks.text(index, opening) for index, opening in enumerate(self.openings) if opening]
            frames = [sse.event(chunk) for chunk in starts if chunk is not None]
            await stream.write(b"".join([*frames, _frames(chunks, first)]))
            async for pieces in rest:
                if frame := _frames(chunks, pieces):
                    await stream.write(frame)
            if include_usage:
                await stream.write(sse.event(chunks.usage(self.generation.usage)))
            await stream.write(sse.DONE)

    async def _respond(self, send: Send, first: list[Piece], rest: AsyncIterator[list[Piece]]) -> None:
        gathered = list(first)
        async for pieces in rest:
            gathered += pieces
        choices = [
            _whole_choice(index, opening, [piece for piece in gathered if piece.index == index])
            for index, opening in enumerate(self.openings)
        ]
        await json_response(send, 200, self.form.whole(self.head, choices, self.generation.usage))


def _whole_choice(index: int, opening: str, pieces: list[Piece]) -> Choice:
    logprobs: list[ScoredToken] = [token for piece in pieces for token in piece.logprobs or ()]
    has_logprobs = any(piece.logprobs is not None for piece in pieces)
    finish = pieces[-1].finish or FinishReason.STOP
    text = opening + "".join(piece.text for piece in pieces)
    return Choice(index, text, finish, logprobs if has_logprobs else None)


def _frames(chunks: ChatChunks | CompletionChunks, pieces: list[Piece]) -> bytes:
    frames = []
    for piece in pieces:
        if piece.text or piece.logprobs:
            frames.append(sse.event(chunks.text(piece.index, piece.text, piece.logprobs)))
        if piece.finish is not None:
            frames.append(sse.event(chunks.finish(piece.index, piece.finish)))
    return b"".join(frames)

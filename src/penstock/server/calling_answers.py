"""Answers to chats with tools: text and calls, as each API's clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.api import sse
from penstock.api.anthropic import Stop, events, message
from penstock.api.anthropic.events import Blocks
from penstock.api.anthropic.responses import text_block, tool_use_block
from penstock.api.openai import Call, ChatChunks, Choice, ResponseHead, ScoredToken, chat_completion
from penstock.core.request import FinishReason
from penstock.server.answers import grouped
from penstock.server.anthropic_answer import MessageAnswer
from penstock.server.choices import Piece
from penstock.server.generation import Generation
from penstock.text.tools import CallArguments, CallBegun, CallEnded, Part, Text


@dataclass(frozen=True)
class CallingChat:
    """For OpenAI's clients."""

    head: ResponseHead
    generation: Generation

    def opening(self) -> list[bytes]:
        started = [self._chunks.start(index, None) for index in range(self.generation.num_choices)]
        return [sse.event(chunk) for chunk in started if chunk is not None]

    def events(self, piece: Piece) -> list[bytes]:
        found, logprobs = [], piece.logprobs
        for part in piece.parts or ():
            if (chunk := self._chunk(piece.index, part, logprobs)) is not None:
                found.append(chunk)
                logprobs = None
        if logprobs:  # of tokens whose text is held back
            found.append(self._chunks.text(piece.index, "", logprobs))
        if piece.finish is not None:
            found.append(self._chunks.finish(piece.index, "tool_calls" if piece.is_calling else piece.finish))
        return [sse.event(chunk) for chunk in found]

    def closing(self) -> list[bytes]:
        usage = [sse.event(self._chunks.usage(self.generation.usage))] if self.generation.options.include_usage else []
        return [*usage, sse.DONE]

    def whole(self, pieces: list[Piece]) -> bytes:
        by_choice = grouped(pieces, self.generation.num_choices)
        choices = [self._whole(index, found) for index, found in enumerate(by_choice)]
        return chat_completion(self.head, choices, self.generation.usage)

    def _whole(self, index: int, pieces: list[Piece]) -> Choice:
        blocks = _blocks(part for piece in pieces for part in piece.parts or ())
        last, has_logprobs = pieces[-1], any(piece.logprobs is not None for piece in pieces)
        return Choice(
            index,
            "".join(block.text for block in blocks if isinstance(block, Text)),
            "tool_calls" if last.is_calling else last.finish or FinishReason.STOP,
            [token for piece in pieces for token in piece.logprobs or ()] if has_logprobs else None,
            [self._call(index, block) for block in blocks if isinstance(block, _Called)],
        )

    def _call(self, index: int, called: _Called) -> Call:
        assert self.generation.calling is not None
        call_id = self.generation.calling.format.call_id("call_", self.head.id, index, called.number)
        return Call(call_id, called.name, called.arguments)

    def _chunk(self, index: int, part: Part, logprobs: Sequence[ScoredToken] | None) -> bytes | None:
        match part:
            case Text(text):
                return self._chunks.text(index, text, logprobs)
            case CallBegun(number, name):
                return self._chunks.call(index, number, self._call(index, _Called(number, name)), logprobs)
            case CallArguments(number, text):
                return self._chunks.arguments(index, number, text, logprobs)
            case CallEnded():
                return None

    @cached_property
    def _chunks(self) -> ChatChunks:
        return ChatChunks(self.head, include_usage=self.generation.options.include_usage)


@dataclass(frozen=True)
class CallingMessage(MessageAnswer):
    """For Anthropic's clients."""

    def opening(self) -> list[bytes]:
        return events.start_empty(self.head, self._usage())

    def events(self, piece: Piece) -> list[bytes]:
        found = [event for part in piece.parts or () for event in self._write(self._blocks, part)]
        if piece.finish is not None:
            found += [*self._blocks.close(), *events.end_empty(self._stop(piece), self._usage())]
        return found

    def whole(self, pieces: list[Piece]) -> bytes:
        blocks = [
            text_block(block.text.lstrip("\n") if at else block.text)
            if isinstance(block, Text)
            else tool_use_block(self._call_id(block.number), block.name, block.arguments)
            for at, block in enumerate(_blocks(part for piece in pieces for part in piece.parts or ()))
        ]
        return message(self.head, blocks, self._stop(pieces[-1]), self._usage())

    def _stop(self, last: Piece) -> Stop:
        return Stop("tool_use") if last.is_calling else super()._stop(last)

    def _call_id(self, number: int) -> str:
        assert self.generation.calling is not None
        return self.generation.calling.format.call_id("toolu_", self.head.id, number)

    def _write(self, blocks: Blocks, part: Part) -> list[bytes]:
        match part:
            case Text(text):
                return blocks.text(text)
            case CallBegun(number, name):
                return blocks.call(self._call_id(number), name)
            case CallArguments(_, text):
                return blocks.arguments(text)
            case CallEnded():
                return blocks.close()

    @cached_property
    def _blocks(self) -> Blocks:
        """As they are after what another replica sent."""
        blocks = Blocks()
        for part in self.generation.resumed_parts.get(0, ()):
            self._write(blocks, part)
        return blocks


@dataclass
class _Called:
    number: int
    name: str
    arguments: str = ""


def _blocks(parts: Iterable[Part]) -> list[Text | _Called]:
    """What was told in parts, each whole."""
    found: list[tuple[_Called | None, list[str]]] = []  # the call, or None, and its texts: many, and joined once
    for part in parts:
        last, texts = found[-1] if found else (None, None)
        match part:
            case Text(text) if last is None and texts is not None:
                texts.append(text)
            case Text(text):
                found.append((None, [text]))
            case CallBegun(number, name):
                found.append((_Called(number, name), []))
            case CallArguments(_, text) if last is not None and texts is not None:
                texts.append(text)
    wholes = [(call, "".join(texts)) for call, texts in found]
    return [Text(text) if call is None else replace(call, arguments=text) for call, text in wholes]

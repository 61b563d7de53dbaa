"""Answers as Anthropic's clients read them: a stream of events, or whole."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.anthropic import MessageHead, Stop, Usage, events, message
from penstock.api.anthropic.responses import text_block
from penstock.core.request import FinishReason
from penstock.server.choices import Piece
from penstock.server.generation import Generation


@dataclass(frozen=True)
class MessageAnswer:
    head: MessageHead
    max_tokens: int  # the client's own limit
    generation: Generation

    def opening(self) -> list[bytes]:
        return events.start(self.head, self._usage())

    def events(self, piece: Piece) -> list[bytes]:
        text = [events.text(piece.text)] if piece.text else []
        return text if piece.finish is None else text + events.end(self._stop(piece), self._usage())

    def closing(self) -> list[bytes]:
        return []

    def whole(self, pieces: list[Piece]) -> bytes:
        text = "".join(piece.text for piece in pieces)
        return message(self.head, [text_block(text)], self._stop(pieces[-1]), self._usage())

    def _usage(self) -> Usage:
        generation = self.generation
        return Usage.of(generation.num_prompt_tokens, generation.num_output_tokens, generation.num_cached_tokens)

    def _stop(self, last: Piece) -> Stop:
        if last.stop is not None:
            return Stop("stop_sequence", last.stop)
        if last.finish is not FinishReason.LENGTH:
            return Stop("end_turn")
        is_at_limit = self.generation.num_output_tokens >= self.max_tokens
        return Stop("max_tokens" if is_at_limit else "model_context_window_exceeded")

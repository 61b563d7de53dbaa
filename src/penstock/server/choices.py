"""Token events become text: one `ChoiceText` per choice, with its own detokenizer and stop strings, and with its own
parser where the text may hold thoughts or calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.api.openai import ScoredToken
from penstock.core.request import FinishReason, TokenEvent, TokenLogprobs
from penstock.server.reasoning import Reasoning
from penstock.server.tool_calling import ToolCalling
from penstock.text.detokenizer import Detokenizer
from penstock.text.reasoning import AnswerParser
from penstock.text.stops import StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import Part, ReasoningText, Text


@dataclass(frozen=True)
class Piece:
    """The text that one event adds to a choice, which can no longer change, and perhaps the end."""

    index: int
    text: str
    logprobs: list[ScoredToken] | None
    finish: FinishReason | None
    stop: str | None = None  # the stop string that ended it
    token_ids: list[int] = field(default_factory=list)  # all of the event's, up to where it ended
    cached_tokens: int = 0  # of the prompt; with the first tokens of a choice
    parts: list[Part] | None = None  # where the model reasons, or tools may be called: what the text says
    is_calling: bool = False  # it ended, and with whole calls


class ChoiceText:
    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        tokenizer: Tokenizer,
        stops: StopStrings,
        calling: ToolCalling | None = None,
        reasoning: Reasoning | None = None,
    ) -> None:
        self.num_tokens = 0
        self._thoughts = reasoning.tracker(tokenizer) if reasoning is not None else None
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._stops = stops.scanner()
        self._has_stops = bool(stops.first_characters)
        self._parser = _parser(calling, reasoning)
        self._is_hiding = reasoning is not None and not reasoning.asked.is_shown
        self._must_call = calling is not None and calling.is_required
        self._resumed_ids: list[int] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it, or the last call that is wanted."""
        return self._stops.hit is not None or (self._parser is not None and self._parser.is_done)

    def resume(self, token_ids: list[int]) -> list[Part]:
        """Reads tokens whose text was sent by another replica; what it held back is held back here. Returns what was
        sent, where it has a parser."""
        self._resumed_ids = token_ids
        self._count(token_ids)
        text, _ = self._stops.push(self._detokenizer.push(token_ids))
        return self._parser.push(text) if self._parser is not None else []

    def resumed_text(self) -> bytes:
        """The text of the tokens that another replica made, whether or not all of it was sent."""
        skipped, token_bytes = self._detokenizer.skipped_ids, self._tokenizer.token_bytes
        return b"".join(token_bytes(token_id) for token_id in self._resumed_ids or () if token_id not in skipped)

    def read_event(self, event: TokenEvent) -> Piece:
        """The text of an event. A finish that the engine does not know of is a stop string."""
        all_ids, logprobs, finish = event.token_ids, event.logprobs, event.finish
        token_ids = all_ids[:-1] if finish is FinishReason.STOP else all_ids  # a stop token is no part of the text
        text, is_stopped, num_read = self._read(token_ids)
        if is_stopped:
            all_ids = token_ids = token_ids[:num_read]
            finish = FinishReason.STOP
        elif finish is not None:
            rest, is_stopped = self._stops.push(self._detokenizer.flush())
            text += rest if is_stopped else rest + self._stops.flush()
            finish = FinishReason.STOP if is_stopped else finish
        parts, is_calling = None, False
        if self._parser is not None:
            parts = self._parser.push(text)
            if self._parser.is_done:
                finish = FinishReason.STOP
            if finish is not None:
                # Text of an answer that is calls and nothing else is the beginning of one that was cut.
                held = self._parser.flush(is_cut=finish is not FinishReason.STOP)
                parts += [p for p in held if not (self._must_call and isinstance(p, Text))]
            if self._is_hiding:
                parts = [part for part in parts if not isinstance(part, ReasoningText)]
            is_calling = finish is FinishReason.STOP and 0 < self._parser.num_ended == self._parser.num_begun
        self._count(all_ids)
        scored = None if logprobs is None else self._score(token_ids, logprobs)
        is_counted = self._resumed_ids is not None  # where the prompt was computed first
        cached_tokens = 0 if is_counted else event.cached_tokens or 0
        return Piece(self._index, text, scored, finish, self._stops.hit, all_ids, cached_tokens, parts, is_calling)

    def _count(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        if self._thoughts is not None:
            for token_id in token_ids:
                self._thoughts.take(token_id)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._thoughts.num_tokens if self._thoughts is not None else 0

    def _read(self, token_ids: list[int]) -> tuple[str, bool, int]:
        """Their text, whether a stop string ended it, and with which of them: the rest was not asked for. Tokens may
        come several at a time, and that must not be seen in what is counted."""
        if not self._has_stops or len(token_ids) < 2:
            return *self._stops.push(self._detokenizer.push(token_ids)), len(token_ids)
        read = ""
        for count, token_id in enumerate(token_ids, 1):
            text, is_stopped = self._stops.push(self._detokenizer.push([token_id]))
            read += text
            if is_stopped:
                return read, True, count
        return read, False, len(token_ids)

    def _score(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        return [
            self._scored(token_id, entry.logprob, [self._scored(other, value) for other, value in entry.top])
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        ]

    def _scored(self, token_id: int, logprob: float, top: list[ScoredToken] | None = None) -> ScoredToken:
        raw = self._tokenizer.token_bytes(token_id)
        is_shown = token_id not in self._detokenizer.skipped_ids
        return ScoredToken(raw.decode(errors="replace"), raw, logprob, top or (), is_shown, token_id)


def _parser(calling: ToolCalling | None, reasoning: Reasoning | None) -> AnswerParser | None:
    """None: the text is the answer."""
    if reasoning is None and calling is None:
        return None
    if reasoning is not None and reasoning.is_told_apart:
        return reasoning.parser(calling)
    calls, most = (calling.parser(), calling.max_calls) if calling is not None else (None, None)
    return AnswerParser(None, calls, most)

"""Token events become text: one `ChoiceText` per choice, with its own detokenizer and stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.api.openai import GenerationOptions, ScoredToken
from penstock.core.request import FinishReason, TokenEvent, TokenLogprobs
from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopStrings
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one event adds to a choice: text that can no longer change, and perhaps the end."""

    index: int
    text: str
    logprobs: list[ScoredToken] | None
    finish: FinishReason | None
    stop: str | None = None  # the stop string that ended it
    token_ids: list[int] = field(default_factory=list)  # all of the event's
    cached_tokens: int = 0  # of the prompt; with the first tokens of a choice


class ChoiceText:
    def __init__(self, index: int, prompt_ids: list[int], tokenizer: Tokenizer, options: GenerationOptions) -> None:
        skip = options.skip_special_tokens
        self.num_tokens = 0
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip)
        self._stops = StopStrings(options.stop, include=options.include_stop_str_in_output)
        self._resumed_ids: list[int] | None = None

    @property
    def is_stopped(self) -> bool:
        """By a stop string."""
        return self._stops.hit is not None

    def resume(self, token_ids: list[int]) -> None:
        """Take tokens whose text was sent by another replica. What it held back is held back here."""
        self._resumed_ids = token_ids
        self.num_tokens += len(token_ids)
        self._stops.push(self._detokenizer.push(token_ids))

    def resumed_characters(self) -> int:
        """Of the tokens whose text another replica sent, each read by itself."""
        return sum(len(self._tokenizer.token_text(token_id)) for token_id in self._resumed_ids or ())

    def take(self, event: TokenEvent) -> Piece:
        """The text of an event. A finish that the engine does not know of is a stop string."""
        self.num_tokens += len(event.token_ids)
        token_ids, logprobs, finish = event.token_ids, event.logprobs, event.finish
        if finish is FinishReason.STOP:  # the stop token ends the text and is no part of it
            token_ids = token_ids[:-1]
        text, is_stopped = self._stops.push(self._detokenizer.push(token_ids))
        if is_stopped:
            finish = FinishReason.STOP
        elif finish is not None:
            rest, is_stopped = self._stops.push(self._detokenizer.flush())
            text += rest if is_stopped else rest + self._stops.flush()
            finish = FinishReason.STOP if is_stopped else finish
        scored = None if logprobs is None else self._score(token_ids, logprobs)
        is_counted = self._resumed_ids is not None  # where the prompt was computed first
        cached_tokens = 0 if is_counted else event.cached_tokens or 0
        return Piece(self._index, text, scored, finish, self._stops.hit, event.token_ids, cached_tokens)

    def _score(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        return [
            self._scored(token_id, entry.logprob, [self._scored(other, value) for other, value in entry.top])
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        ]

    def _scored(self, token_id: int, logprob: float, top: list[ScoredToken] | None = None) -> ScoredToken:
        raw = self._tokenizer.token_bytes(token_id)
        return ScoredToken(text=raw.decode(errors="replace"), raw=raw, logprob=logprob, top=top or ())

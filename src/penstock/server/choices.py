"""Token events become text: one `ChoiceText` per choice, with its own detokenizer and stop strings."""

from __future__ import annotations

from dataclasses import dataclass

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


class ChoiceText:
    def __init__(self, index: int, prompt_ids: list[int], tokenizer: Tokenizer, options: GenerationOptions) -> None:
        skip = options.skip_special_tokens
        self.num_tokens = 0
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip)
        self._stops = StopStrings(options.stop, include=options.include_stop_str_in_output)

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
        return Piece(self._index, text, scored, finish)

    def _score(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        return [
            self._scored(token_id, entry.logprob, [self._scored(other, value) for other, value in entry.top])
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        ]

    def _scored(self, token_id: int, logprob: float, top: list[ScoredToken] | None = None) -> ScoredToken:
        raw = self._tokenizer.token_bytes(token_id)
        return ScoredToken(text=raw.decode(errors="replace"), raw=raw, logprob=logprob, top=top or ())

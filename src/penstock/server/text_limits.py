"""The length of texts that are read whole: for a vector, a score or a label of each."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.text.tokenizer import EncodedPair, Tokenizer

MAX_CONTEXTS = 4  # that a text may be long if it is counted, or cut to what is wanted of it


@dataclass(frozen=True)
class TextLimits:
    tokenizer: Tokenizer
    max_tokens: int  # longest text
    vocab_size: int  # the model's: a tokenizer may have more tokens

    def fit(self, ids: list[int], *, keep_first: int | None, param: str | None) -> list[int]:
        """A text as the model will see it: cut only where the client asked for it, and then its end goes, but for the
        mark that ends every text of some models."""
        keep = self.max_tokens if keep_first == -1 else keep_first
        if keep is not None and len(ids) > keep:
            is_marked = keep > 1 and ids[-1] in self.tokenizer.special_ids
            ids = [*ids[: keep - 1], ids[-1]] if is_marked else ids[:keep]
        self._check_ids(ids, param)
        return ids

    def fit_pairs(self, pairs: list[tuple[str, str]], *, keep_first: int | None) -> list[EncodedPair]:
        """Two texts each as the model will see them together; of those that are too long the longer one is cut."""
        marks = self.tokenizer.num_pair_marks
        if keep_first not in (None, -1) and keep_first < marks + 2:
            said = f"must leave a token of each text: {marks} more are between and around them"
            raise InvalidRequest(f"truncate_prompt_tokens {said}", param="truncate_prompt_tokens")
        for one in {text for pair in pairs for text in pair}:
            self.check_text(one, None, contexts=1 if keep_first is None else MAX_CONTEXTS)
        keep = self.max_tokens if keep_first == -1 else keep_first
        found = self.tokenizer.encode_pairs(pairs, keep)
        for pair in found:
            self._check_ids(pair.ids, None)
        return found

    def _check_ids(self, ids: list[int], param: str | None) -> None:
        if not ids:
            raise InvalidRequest("a text has no tokens", param=param)
        if max(ids) >= self.vocab_size:
            raise InvalidRequest(f"a text has a token, {max(ids)}, that this model does not know", param=param)
        self.check_tokens(len(ids), param)

    def check_text(self, text: str, param: str | None, *, contexts: int = 1) -> None:
        """Refuses a text that is longer than so many contexts whatever its tokens are, without making them."""
        if (num_tokens := self.min_tokens(text)) > contexts * self.max_tokens:
            raise ContextLengthExceeded(
                f"this model takes texts of {self.max_tokens} tokens, and one has at least {num_tokens}; "
                f"truncate_prompt_tokens cuts those of up to {MAX_CONTEXTS} times as many",
                param=param,
            )

    def check_tokens(self, num_tokens: int, param: str | None) -> None:
        if num_tokens > self.max_tokens:
            raise ContextLengthExceeded(
                f"this model takes texts of {self.max_tokens} tokens, and one has {num_tokens}; "
                "truncate_prompt_tokens cuts them",
                param=param,
            )

    def min_tokens(self, text: str) -> int:
        """No text of so many characters has fewer tokens: a character is at least a byte."""
        if len(text) <= self.max_tokens or (longest := self.tokenizer.max_token_bytes) is None:
            return 0
        return -(-len(text) // longest)

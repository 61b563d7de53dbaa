"""Token ids to text as they come, a little at a time.

It works on token bytes and keeps only the bytes of a character that is not whole yet, so a token costs the same
wherever it stands. Pushes and flush together give exactly `Tokenizer.decode` of all the ids.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

_MAX_BYTES_OF_A_CHARACTER = 4


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`prompt_ids` are what the text goes on from: only a text that starts from nothing drops its first space,
        and a character may begin in the prompt. `kept_ids` are special tokens that are not skipped."""
        self._token_bytes = tokenizer.token_bytes
        self.skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        if kept_ids:
            self.skipped_ids -= kept_ids
        self._pending = b""
        self._drops_space = tokenizer.drops_leading_space and all(
            token_id in self.skipped_ids for token_id in prompt_ids
        )
        self.push(prompt_ids[-_MAX_BYTES_OF_A_CHARACTER:])

    def copy(self) -> Detokenizer:
        """Another text that goes on from the same prompt, which is not read again."""
        return copy.copy(self)

    def push(self, ids: Sequence[int]) -> str:
        """The text these tokens settle: no later token can change it."""
        token_bytes, skipped = self._token_bytes, self.skipped_ids
        data = self._pending + b"".join([token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if self._drops_space and data:
            data = data.removeprefix(b" ")
            self._drops_space = False
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return text

    def flush(self) -> str:
        """Text that is left at the end: a character that was never finished."""
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text

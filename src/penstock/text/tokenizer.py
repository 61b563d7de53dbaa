"""A model's tokenizer: text to token ids and back, with the results transformers would give.

It knows nothing of chats or requests. Decoding works on token bytes, as the streaming detokenizer does, so that an
answer reads the same whether it was streamed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from penstock.core.errors import ModelCorrupt
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.text import gguf_tokenizer, token_bounds
from penstock.text.fill_in import find_marks
from penstock.text.token_bytes import TokenBytes

_BATCH = 64  # texts that are tokenized at a time: enough for all cores


class EncodedPair(NamedTuple):
    """Two texts that are read together."""

    ids: list[int]
    types: list[int]  # of each token: which of the two it belongs to, as far as the model is told


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are texts by name: `bos_token`, `eos_token`, …"""
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        backend.no_truncation()  # a file may carry its training set-up; a request is never cut silently
        backend.no_padding()
        _mark_special(backend, self._special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self.fill_in = find_marks({token.content for token in added.values()}.__contains__)
        self._bytes = TokenBytes(backend)

    @classmethod
    def load(cls, source: TokenizerFiles | TokenizerMetadata) -> Tokenizer:
        if isinstance(source, TokenizerMetadata):
            return cls(*gguf_tokenizer.build(source.metadata))
        return cls(_read(source.tokenizer_json), _special_tokens(source.config))

    @classmethod
    def from_json(cls, text: str, special_tokens: Mapping[str, str]) -> Tokenizer:
        """The tokenizer that said `to_json` and `special_tokens`."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text), special_tokens)
        except Exception as error:  # the library raises nothing narrower
            raise ModelCorrupt(f"this is not a tokenizer: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def drops_leading_space(self) -> bool:
        """Whether a text's first space is the tokenizer's own mark and no part of the text (SentencePiece)."""
        return self._bytes.drops_leading_space

    def special_id(self, text: str) -> int | None:
        """Id of a special token; None: to this model it is a text like any other."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def added_id(self, text: str) -> int | None:
        """Id of the token that stands for just this text wherever it comes, special or not; None: there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def special_tokens(self) -> dict[str, str]:
        """Texts by name; only those that the model has."""
        return dict(self._special_tokens)

    def to_json(self) -> str:
        """The tokenizer.json that makes the same tokenizer."""
        return self._backend.to_str()

    @cached_property
    def growth(self) -> int:
        """A text of plain ASCII has at most as many tokens as bytes, any other at most this many times as many."""
        return token_bounds.growth(self._backend)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """No token stands for more bytes of a text; None: of this tokenizer that is not certain."""
        return token_bounds.max_token_bytes(self._backend)

    def divider(self, text: str) -> str | None:
        """A special token of `text` at which texts can be cut and counted in parts; see `token_bounds`."""
        return token_bounds.divider(self._backend, text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens` runs the post-processor (Llama 3 adds its BOS); special tokens spelled out in the
        text are always recognized."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, check: Callable[[int], None] | None = None
    ) -> list[list[int]]:
        """A text that comes several times is tokenized once, and its list is shared. `check` is given the number of
        tokens of each text, and may raise, before there is a list of it and before many others are tokenized."""
        found: dict[str, list[int]] = {}
        distinct = list(dict.fromkeys(texts))
        for at in range(0, len(distinct), _BATCH):
            batch = distinct[at : at + _BATCH]
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
            if check is not None:
                for encoding in encodings:
                    check(len(encoding))
            found |= zip(batch, (encoding.ids for encoding in encodings), strict=True)
        return [found[text] for text in texts]

    @property
    def num_pair_marks(self) -> int:
        """Tokens that are added to two texts that are read together."""
        return self._backend.num_special_tokens_to_add(True)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], keep: int | None = None) -> list[EncodedPair]:
        """Two texts each, put together as the post-processor does. If they have more than `keep` tokens together, the
        longer one loses its end."""
        room = None if keep is None else keep - self.num_pair_marks
        found = []
        for first, second in pairs:
            if room is None:
                encoding = self._backend.encode(first, second)
            else:
                one, other = (self._backend.encode(text, add_special_tokens=False) for text in (first, second))
                for part, length in zip((one, other), _cut(len(one), len(other), room), strict=True):
                    part.truncate(length)
                encoding = self._backend.post_process(one, other, True)
            found.append(EncodedPair(encoding.ids, encoding.type_ids))
        return found

    def count(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Number of tokens of each text: `encode_batch` without the ids, of which a long text has many."""
        return list(map(len, self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self._bytes[token_id] for token_id in ids if token_id not in skipped])
        if self.drops_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; perhaps only a part of a character."""
        return self._bytes[token_id]

    def vocabulary_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġhello`; empty where it has none of this id."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode(errors="replace")


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that together have room: the longer one is cut until both are as long, then both are."""
    if first + second <= room:
        return first, second
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    return room - half, half


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelCorrupt(f"{path} is not a tokenizer: {error}") from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like in a tokenizer_config.json: a value is the text itself or an object around it. What
    `encode` adds is not read from there: tokenizer.json says it, and wins in transformers too."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Tokens that only the configuration calls special. One the vocabulary lacks is left out: its new id would lie
    beyond the model's embeddings."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([text for text in texts if text not in known and backend.token_to_id(text) is not None])

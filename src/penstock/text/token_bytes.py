"""The exact bytes each token stands for, read off a tokenizer's decoder.

A decoder is a pipeline over the whole list of tokens. The pipelines that language models use do one thing to
each token and at most one thing to the start of the text, so a token's bytes can be known alone, and text can be
made token by token without ever decoding anything twice. A decoder that is not of this kind is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from penstock.core.errors import ModelUnsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, each worked out on first use. Ids that the vocabulary does not have are empty."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.drops_leading_space = False
        self._continues: str | None = None  # how a token begins that goes on with a word; others begin one
        for step in _decoder_steps(tokenizer):
            self._understand(step)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        found = self[token_id] = self._bytes_of(token) if token is not None else b""
        return found

    def _understand(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                self._replacements.append((mark, " "))
                self.drops_leading_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.drops_leading_space = start == 1
            case {"type": "WordPiece", "prefix": prefix}:  # but for the spaces it takes away before commas and the like
                self._continues = prefix
                self.drops_leading_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelUnsupported(
                    f"the tokenizer decodes with '{step.get('type')}', which is not known here: {step}"
                )

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level and all(char in _BYTE_OF for char in token):
            return bytes([_BYTE_OF[char] for char in token])
        if self._continues is not None:
            return (token.removeprefix(self._continues) if token.startswith(self._continues) else f" {token}").encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._has_byte_tokens and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        return token.encode()


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise ModelUnsupported("the tokenizer has no decoder, so its tokens cannot be turned into text")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """GPT-2's spelling of bytes: a printable Latin-1 byte is itself, the others are shifted past U+0100 in order."""
    shifted = 0x100
    for byte in range(0x100):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


_BYTE_OF = dict(_byte_alphabet())

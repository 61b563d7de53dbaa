"""Tokenizer bundle of a replica, for gateways that count prompts as it does: its model's tokenizer and chat template.

It is named by its digest, which every report of the replica repeats: a gateway that has that digest need not ask again.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from penstock.core.image_processor import ImageProcessorConfig

PATH = "/v1/penstock/text"


class TokenizerBundle(msgspec.Struct, frozen=True):
    tokenizer: str  # a tokenizer.json
    special_tokens: dict[str, str]  # texts by name: bos_token, …
    chat_template: str | None
    vocab_size: int  # of the model, which may have fewer rows than its tokenizer has words
    bos_token_id: int | None
    tool_format: str | None = None  # None: as the template tells
    reasoning_format: str | None = None  # likewise; `none`: thoughts are not told apart
    images: ImageProcessorConfig | None = None  # None: the model takes none


_decoder = msgspec.json.Decoder(TokenizerBundle)
encode = msgspec.json.Encoder().encode


def decode(body: bytes) -> TokenizerBundle:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(body)


def digest(encoded: bytes) -> str:
    return blake2b(encoded, digest_size=12).hexdigest()

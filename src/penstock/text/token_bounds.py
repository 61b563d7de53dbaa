"""Bounds on a text's tokens without making them: how many at most and at least, and where a text may be cut in two.

A token is at least one byte of the normalized text, so a text has at most as many tokens as that has bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

_MAX_GROWTH = 18  # of any normalizer that is known; U+FDFA grows to 33 bytes from 3 under NFKC
_GROWTH = {"NFC": 3, "NFD": 3, "Prepend": 1, "Strip": 1, "StripAccents": 1}


def growth(backend: tokenizers.Tokenizer) -> int:
    """Factor by which normalization may make a text longer, in bytes; of plain ASCII none makes more."""
    return max((_growth(step) for step in _steps(backend)), default=1)


def _growth(step: dict[str, Any]) -> int:
    match step:
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return 1  # the mark is a word of every vocabulary that uses it
        case {"type": kind}:
            return _GROWTH.get(kind, _MAX_GROWTH)
    return _MAX_GROWTH


def _steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    if backend.normalizer is None:
        return
    normalizer = json.loads(backend.normalizer.__getstate__())
    yield from normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


_SHRINK = {"NFC": 3, "NFD": 1, "Prepend": 1}  # how many times fewer bytes it may make of a text
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # what splitters do with what they find


def max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Most bytes of a text that a token stands for. None where that is not certain: a normalizer or a splitter may drop
    a part of the text, a token may take the space around it, and an unknown word of any length is one token.
    """
    described = json.loads(backend.to_str())
    model, added = described["model"], backend.get_added_tokens_decoder().values()
    if model["type"] != "BPE" or any(token.lstrip or token.rstrip for token in added):
        return None
    shrink = 1
    for step in _steps(backend):
        if _growth(step) == 1 and step["type"] == "Replace":
            continue  # a space becomes a mark
        if (factor := _SHRINK.get(step["type"])) is None:
            return None
        shrink *= factor
    splitters = list(_splitters(described.get("pre_tokenizer")))
    if not all(_keeps_all(splitter) for splitter in splitters):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    if any(splitter["type"] == "ByteLevel" for splitter in splitters):
        knows_all = all(character in vocab for character in pre_tokenizers.ByteLevel.alphabet())
        longest = max(map(len, vocab), default=0)  # a character for each byte
    else:
        knows_all = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
        longest = max((len(token.encode()) for token in vocab), default=0)
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return longest * shrink if knows_all else None


def _splitters(described: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if described is not None:
        yield from described["pretokenizers"] if described["type"] == "Sequence" else [described]


def _keeps_all(splitter: dict[str, Any]) -> bool:
    match splitter:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior in _KEEPING
    return False


def divider(backend: tokenizers.Tokenizer, text: str) -> str | None:
    """The special token of `text` at which any text can be cut before each of its occurrences: the tokens of the parts
    are together the tokens of the whole. None: it has none that surely does this.

    Added tokens are found in the raw text before anything else is done, leftmost first. So a cut is safe before one
    that is found wherever it stands: no other reaches into it, it eats no space around it, and it is not normalized.
    """
    added = list(backend.get_added_tokens_decoder().values())
    found = [token.content for token in added if _is_plain(token) and token.content in text]
    safe = [one for one in found if not any(_meet(one, other.content) for other in added)]
    return max(safe, key=text.count, default=None)


def _is_plain(token: AddedToken) -> bool:
    return token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)


def _meet(one: str, other: str) -> bool:
    """Whether two tokens can share characters of a text, without being the same at the same place."""
    if one != other and (one in other or other in one):
        return True
    shortest = min(len(one), len(other))
    return any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in range(1, shortest))

"""Prompts as they may be written down if the operator wants it: the words of a request without what looks like a
credential, a mail address or a long number, and without what the operator's own patterns find."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from penstock.core.errors import ConfigError
from penstock.observe.redaction import redact

CUT = "…"
_MARGIN = 1024  # characters that are searched beyond what is shown: nothing that is shown was cut in two before
# An image in a request follows these: in a data: URL, and in /v1/messages.
_BEFORE_IMAGE = re.compile(rb'base64,|"data"\s*+:\s*+"(?=[A-Za-z0-9+/=\\]{64})')
_IMAGE = re.compile(rb"(?:[A-Za-z0-9+/=_%-]++|\\/)*+")
# Time in proportion to the text, whatever a client sends: a match begins only where a run of these characters does.
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)++")
_PERSONAL = (
    _MAIL,
    _MAIL,  # again: one that followed another without a gap has one now
    re.compile(r"(?<![\w.])\+?\d(?:[ ./-]?\d){8,}(?![\w.])"),  # a telephone, a card, an account
)


class PromptSettings(NamedTuple):
    max_chars: int
    patterns: tuple[str, ...] = ()


class _Asked(msgspec.Struct):
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()  # of /v1/responses, with input
    input: msgspec.Raw = msgspec.Raw()


_asked_decoder = msgspec.json.Decoder(_Asked)


class PromptText:
    def __init__(self, settings: PromptSettings) -> None:
        """Raises ConfigError for a pattern that is none."""
        self._max_chars = settings.max_chars
        self._patterns = [*_PERSONAL, *map(_compiled, settings.patterns)]

    def of(self, body: bytes) -> str:
        whole = _words(body, self._max_chars + _MARGIN + 1)
        text = redact(whole[: self._max_chars + _MARGIN])
        for pattern in self._patterns:
            text = pattern.sub(CUT, text)
        shown = self._max_chars
        if len(whole) > self._max_chars + _MARGIN:
            shown = max(0, min(shown, len(text) - _MARGIN))  # what stands at the end may have been cut in two
        return text if len(text) <= shown else f"{text[:shown]}{CUT}"


def _words(body: bytes, max_chars: int) -> str:
    """The parts of a request that are the client's words, as JSON; so much of them."""
    try:
        asked = _asked_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    parts = (bytes(part) for part in (asked.system, asked.messages, asked.prompt, asked.instructions, asked.input))
    # A character is four bytes at most; the first bytes are enough for the first characters.
    texts = [_without_images(part, 4 * max_chars) for part in parts if part]
    return " ".join([text.decode(errors="replace") for text in texts])[:max_chars]


def _without_images(part: bytes, most: int) -> bytes:
    """So many of its first bytes, with a mark in place of each image: no words, and nothing to be written down."""
    found, end = b"", 0
    while len(found) < most and (before := _BEFORE_IMAGE.search(part, end, end + most)) is not None:
        found += part[end : before.end()] + CUT.encode()
        image = _IMAGE.match(part, before.end())
        assert image is not None, "it matches nothing, too"
        end = image.end()
    return (found + part[end : end + most])[:most]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is no pattern: {error}", param="logs.redact") from None

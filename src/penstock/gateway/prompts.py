"""What was asked, as it may be written down if the operator wants it: the words of a request without what looks like a
credential, a mail address or a long number, and without what the operator's own patterns find."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from penstock.core.errors import ConfigError
from penstock.observe.redaction import redact

CUT = "…"
_PERSONAL = (
    re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),  # a mail address
    re.compile(r"(?<![\w.])\+?\d(?:[ ./-]?\d){8,}(?![\w.])"),  # a telephone, a card, an account
)


class PromptSettings(NamedTuple):
    max_chars: int
    patterns: tuple[str, ...] = ()


class _Asked(msgspec.Struct):
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class PromptText:
    def __init__(self, settings: PromptSettings) -> None:
        """Raises ConfigError for a pattern that is none."""
        self._max_chars = settings.max_chars
        self._patterns = [*_PERSONAL, *map(_compiled, settings.patterns)]

    def of(self, body: bytes) -> str:
        text = redact(_words(body))
        for pattern in self._patterns:
            text = pattern.sub(CUT, text)
        return text if len(text) <= self._max_chars else f"{text[: self._max_chars]}{CUT}"


def _words(body: bytes) -> str:
    """The parts of a request that are the client's words, as JSON."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    parts = (bytes(part) for part in (asked.system, asked.messages, asked.prompt))
    return " ".join([part.decode(errors="replace") for part in parts if part])


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is no pattern: {error}", param="logs.redact") from None

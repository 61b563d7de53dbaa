"""What was asked, as it may be written down if the operator wants it: the words of a request without what looks like a
credential, a mail address or a long number, and without what the operator's own patterns find."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from penstock.core.errors import ConfigError
from penstock.observe.redaction import redact

CUT = "…"
_MARGIN = 1024  # characters that are searched beyond what is shown: nothing that is shown was cut in two before
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
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    parts = (bytes(part) for part in (asked.system, asked.messages, asked.prompt, asked.instructions, asked.input))
    # A character is four bytes at most; the first bytes are enough for the first characters.
    return " ".join([part[: 4 * max_chars].decode(errors="replace") for part in parts if part])[:max_chars]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is no pattern: {error}", param="logs.redact") from None

"""Credentials never leave a process by its logs: what looks like one is cut down to what may be shown.

It runs on every line, so each pattern has a word that must be there before it is tried: the patterns alone would cost
some 60 microseconds a line, the words cost one. A line may hold what a client sent, so every pattern takes time in
proportion to the text, whatever it is: it begins with a fixed word, and from there scans nothing that the next match of
that word would scan again.
"""

from __future__ import annotations

import logging
import re

_CREDENTIALS = tuple(
    (word, re.compile(pattern, re.IGNORECASE), shown)
    for word, pattern, shown in (
        ("ps", r"(ps[ka]_[0-9a-z]{1,10})[0-9a-z_]*", r"\1_…"),  # a tenant's or an admin's: its id may be shown
        ("bearer", r"(\bBearer\s+)(?!ps[ka]_)[^\s\"',;]+", r"\1…"),
        ("basic", r"(\bauthorization['\"]?\s*[:=,]\s*b?['\"]?Basic\s+)[^\s\"',;]+", r"\1…"),
        ("x-api-key", r"(\bx-api-key['\"]?\s*[:=,]\s*b?['\"]?)(?!ps[ka]_)[^\s\"',;]+", r"\1…"),
        ("x-penstock-secret", r"(\bx-penstock-secret['\"]?\s*[:=,]\s*b?['\"]?)[^\s\"',;]+", r"\1…"),
        ("sk-", r"\b(sk-(?:[a-z]{2,8}-)?)[A-Za-z0-9_-]{8,}", r"\1…"),  # a provider's
        ("@", r"(://[^\s:/@]*+):[^\s/@]++@", r"\1:…@"),  # a password in a URL
    )
)


def redact(text: str) -> str:
    """The text with every credential in it cut down to what may be shown."""
    lowered = text.lower()
    for word, pattern, shown in _CREDENTIALS:
        if word in lowered:
            text = pattern.sub(shown, text)
    return text


class RedactCredentials(logging.Filter):
    """A filter of a log's output that lets no key be written, whoever logs it; tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(_message(record)), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit: to say so, logging would print them as they are
        return f"{record.msg} (with arguments that do not fit)"

"""The words people use for times and spans, in commands and in the admin API."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from penstock.core.errors import InvalidValue

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """`90s`, `15m`, `24h`, `7d`: in seconds."""
    if not (found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)):
        raise InvalidValue(f"{text!r} is not a time such as 90s, 15m, 24h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]


def moment(text: str) -> float:
    """`2026-11-15`, `2026-11-15T12:00`, or how long ago: `24h`, `7d`. UTC unless it says otherwise."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            return time.time() - duration(text)
        except InvalidValue:
            message = f"{text!r} is neither a date such as 2026-11-15 nor a time ago such as 24h or 7d"
            raise InvalidValue(message) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def month_began_s(now_s: float) -> float:
    return moment(time.strftime("%Y-%m-01", time.gmtime(now_s)))

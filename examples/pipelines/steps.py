"""Python steps of these pipelines. They run in processes of their own, with nothing but what their step is given."""

from __future__ import annotations

import re
from typing import Any

LENGTH = 256  # characters that the classifier looks at
_NO_LETTERS = re.compile(r"[\W\d_]+")
_QUEUES = {"billing": "accounts", "delivery": "warehouse", "product": "repairs"}


def letters(text: str) -> list[int]:
    """The code points of a text as the classifier knows them: lower case, one space between words, zeros at the end."""
    plain = f" {_NO_LETTERS.sub(' ', text.lower()).strip()} "[:LENGTH]
    return [ord(one) for one in plain] + [0] * (LENGTH - len(plain))


def ticket(language: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """What the help desk's program reads."""
    queue = _QUEUES.get(facts["topic"], "front desk")
    return {
        "queue": f"{queue} ({language['label']})",
        "priority": 1 if facts["urgent"] else 3,
        "summary": facts["summary"].strip(),
        "sure": round(language["scores"][language["label"]], 2),
    }

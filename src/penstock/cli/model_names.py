"""`NAME=MODEL` of a command line: a model, and the name that clients use for it."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.core.errors import ConfigError

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<model>.*)", re.DOTALL)


class NamedModel(NamedTuple):
    name: str | None  # None: the model's own
    model: str


def name_and_model(text: str) -> NamedModel:
    """An `=` behind a `/` or a `:` belongs to a path or a URL. Raises ConfigError."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return NamedModel(None, text)
    if not found["model"]:
        raise ConfigError(f"'{text}' names no model: NAME=MODEL", param="model")
    return NamedModel(found["name"], found["model"])

"""Whether an engine guesses tokens ahead, with what and how many, by its settings and its device."""

from __future__ import annotations

from typing import Literal

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings

Kind = Literal["off", "ngram", "draft"]

_MAX_TOKENS: dict[Kind, int] = {"off": 0, "ngram": 16, "draft": 6}  # unless told otherwise


def kind_of(settings: EngineSettings, *, overlaps: bool) -> Kind:
    """Kind of speculation. `overlaps`: the device is given a step before the last is read. It must wait to guess."""
    wanted = settings.speculate
    if settings.draft is not None and wanted not in ("auto", "draft"):
        raise ConfigError(f"draft names a model, but speculate is {wanted}", param="draft")
    if wanted == "draft" and settings.draft is None:
        raise ConfigError("speculate is draft, but no model is named to draft with (--draft MODEL)", param="draft")
    if wanted != "auto":
        return wanted
    if settings.draft is not None:
        return "draft"
    return "off" if overlaps else "ngram"


def most_drafts(settings: EngineSettings, *, overlaps: bool) -> int:
    """Largest number of drafts for a sequence in a step; 0: none."""
    kind = kind_of(settings, overlaps=overlaps)
    return (settings.draft_tokens or _MAX_TOKENS[kind]) if kind != "off" else 0

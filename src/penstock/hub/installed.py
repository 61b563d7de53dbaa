"""Where a model's files are, if they are on this machine. Fetches nothing."""

from __future__ import annotations

from pathlib import Path

from penstock.hub.hf_download import hf_directory, is_complete
from penstock.hub.pull import ALIASES, alias_path, is_whole
from penstock.hub.resolve import HF_PREFIX, repository_of


def installed_path(spec: str) -> Path | None:
    """None: it would be downloaded. What is no model at all, `resolve` says."""
    if spec in ALIASES:
        path = alias_path(spec)
        return path if is_whole(path, ALIASES[spec]) else None
    if spec.startswith(HF_PREFIX):
        directory = hf_directory(repository_of(spec))
        return directory if is_complete(directory) else None
    return Path(spec).expanduser()

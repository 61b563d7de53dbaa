"""Directory where penstock keeps what it downloads."""

from __future__ import annotations

import os
from pathlib import Path


def penstock_home() -> Path:
    """PENSTOCK_HOME, or `penstock` in the user's cache directory."""
    if home := os.environ.get("PENSTOCK_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"


def models_directory() -> Path:
    return penstock_home() / "models"

"""Files and directories that are their owner's alone: what penstock writes may say who asked for what, and when.

Files that are there already are left as they are: an operator may have opened them to somebody on purpose.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Literal

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_private(directory: Path) -> None:
    """The directory and those above it that are not there."""
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def open_private(path: Path, mode: Literal["ab", "wb"]) -> IO[bytes]:
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, FILE_MODE))


def is_safe_from_others(path: Path) -> bool:
    """Nobody but this user and root can have written the file, or put another in its place."""
    trusted = (0, os.geteuid())
    file, directory = path.stat(), path.parent.stat()
    return all(each.st_uid in trusted and not each.st_mode & 0o022 for each in (file, directory))

"""A terminal that keeps what is written to it, and the rows that are left on it."""

from __future__ import annotations

import io
import re


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def without_colours(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def rows(stream: io.StringIO) -> list[str]:
    """Each line as it was drawn last."""
    return [line.rpartition("\r")[2].rstrip() for line in without_colours(stream).split("\n") if line]

"""Settings of a file with the lines that they stand in: what is wrong with a setting is told with its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError

_INSIDE = re.compile(r"at `\$([^`]*)`$")  # where in a setting's value msgspec found the fault: $[0].name
_INDEX = re.compile(r"\[([^]]*)\]")


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    values: dict[str, Any]
    lines: dict[str, int]  # by setting: models.smollm2.replicas, models.smollm2.replicas.0

    @contextmanager
    def located(self, elsewhere: Collection[str] = ()) -> Iterator[None]:
        """Begin the message of a ConfigError about a setting of this file with FILE:LINE. Settings in `elsewhere` are
        not this file's: flags win over it."""
        try:
            yield
        except ConfigError as error:
            if error.param is None or error.param in elsewhere:
                raise
            line = self._line_of(error)
            place = self.path if line is None else f"{self.path}:{line}"
            raise ConfigError(f"{place}: {error.message}", param=error.param) from None

    def _line_of(self, error: ConfigError) -> int | None:
        """Line of the setting, or of what it should be in."""
        inside = _INSIDE.search(error.message)
        name = str(error.param) + (_INDEX.sub(r".\1", inside[1]) if inside else "")
        while name and name not in self.lines:
            name = name.rpartition(".")[0]
        return self.lines.get(name)

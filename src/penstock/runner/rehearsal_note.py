"""A note on disk of how much a GPU's rehearsal took, so that the next engine of the same kind starts without one.

The note is kept under all that the memory depends on: the model's shape, the engine's settings, the device, the
libraries and penstock's own code. An engine for which one of them changed rehearses again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.core.private_files import make_private
from penstock.hub.home import penstock_home

_MOST_BESIDE_TORCH = 2 << 30  # bytes of code, workspaces and graphs; a larger difference is somebody else's


@dataclass(frozen=True)
class RehearsalNote:
    path: Path

    @classmethod
    def about(cls, kind: str) -> RehearsalNote:
        """`kind`: all that the memory depends on."""
        return cls(penstock_home() / "rehearsals" / hashlib.sha256(kind.encode()).hexdigest()[:20])

    def read(self) -> int | None:
        """Bytes of the device's memory; None: it has to be measured."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, taken_bytes: int, torch_bytes: int) -> None:
        """Writes the note. `torch_bytes`: the part that torch knows of. If the rest is no engine's, another process
        came or went meanwhile, and nothing is noted."""
        if not 0 <= taken_bytes - torch_bytes <= _MOST_BESIDE_TORCH:
            return
        try:
            make_private(self.path.parent)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(str(taken_bytes))
            os.replace(file.name, self.path)
        except OSError:
            pass  # a read-only home: measured again next time

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)

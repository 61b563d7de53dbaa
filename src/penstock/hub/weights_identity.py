"""Digests of a model's weights that two machines can compare without reading all of them.

Size, beginning, end and some pages between are read of each file: another model, another fine-tune and a broken
download differ in these.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".safetensors", ".gguf")
_EDGE_BYTES = 64 << 10
_PAGE_BYTES = 4 << 10
_NUM_PAGES = 16


def weights_identity(path: Path) -> dict[str, str]:
    """Files of weights by name: those of a directory, or a single one."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
    return {each.name: _digest(each) for each in files}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        found.update(str(size).encode())
        inner = max(0, size - _EDGE_BYTES)
        places = [(0, _EDGE_BYTES), (inner, _EDGE_BYTES)]
        places += [(inner * page // _NUM_PAGES, _PAGE_BYTES) for page in range(1, _NUM_PAGES)]
        for offset, length in places:
            file.seek(offset)
            found.update(file.read(length))
    return found.hexdigest()[:32]

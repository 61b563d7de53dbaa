"""A file for each tenant's lines, so that one tenant's can be handed on, kept or deleted without the others'.

    DIRECTORY/acme.log      and acme.log.1, the one before

Files are for their owner alone. A few are kept open; whose turn is longest ago is closed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO

from penstock.core.private_files import make_private, open_private

_MAX_OPEN = 64


class TenantFiles:
    """Belongs to one thread."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._files: dict[str, IO[bytes]] = {}  # the last used last

    def write(self, lines: Iterable[tuple[str, str]]) -> None:
        """Lines and whose they are. Raises OSError."""
        by_tenant: dict[str, list[str]] = {}
        for tenant, line in lines:
            by_tenant.setdefault(tenant, []).append(line)
        for tenant, own in by_tenant.items():
            self._append(tenant, "\n".join([*own, ""]).encode())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, tenant: str, text: bytes) -> None:
        file = self._files.pop(tenant, None) or self._open(tenant)
        if file.tell() and file.tell() + len(text) > self._max_bytes:
            file.close()
            path = self._path(tenant)
            path.replace(path.with_name(f"{path.name}.1"))
            file = self._open(tenant)
        self._files[tenant] = file
        file.write(text)
        file.flush()
        if len(self._files) > _MAX_OPEN:
            self._files.pop(next(iter(self._files))).close()

    def _open(self, tenant: str) -> IO[bytes]:
        make_private(self._directory)
        return open_private(self._path(tenant), "ab")

    def _path(self, tenant: str) -> Path:
        return self._directory / f"{tenant}.log"

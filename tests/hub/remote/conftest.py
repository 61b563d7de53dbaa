from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.remote.local_web import LocalWeb, local_web


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWeb]:
    """A server, an empty cache, and parts of some kilobytes."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("penstock.hub.remote.parts.PART_BYTES", 4096)
    with local_web() as found:
        yield found

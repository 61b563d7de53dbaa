from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.local_hub import LocalHub, local_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(tmp_path, monkeypatch) as found:
        yield found

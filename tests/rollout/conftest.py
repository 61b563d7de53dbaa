"""A real store with a model of two versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as opened:
        opened.routes.declare([Declared("chat", {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        yield opened

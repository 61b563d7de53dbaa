"""One Valkey for all tests of a session that do not kill it; each has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tenancy.limits.valkey import ValkeyProcess


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()

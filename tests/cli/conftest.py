from collections.abc import Iterator

import pytest

from tests.cli.real_server import RealServer, real_server


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    with real_server() as found:
        yield found

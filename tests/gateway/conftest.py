from collections.abc import Iterator

import pytest

from tests.server.replica import Replica, serving


@pytest.fixture(scope="session")
def two_replicas() -> Iterator[list[Replica]]:
    """For all tests that leave them as they found them: idle, ready, and with nothing but more in their caches."""
    with serving(step_s=0.005) as one, serving(step_s=0.005) as two:
        yield [one, two]


@pytest.fixture(scope="session")
def replica_at_hand() -> Iterator[Replica]:
    """The same for tests that need one, without a pause between its steps."""
    with serving() as found:
        yield found

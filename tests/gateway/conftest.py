from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.replica import Replica


def serving(**options: Any) -> contextlib.AbstractContextManager[Replica]:
    from tests.server import replica  # with it come the SDKs

    return replica.serving(**options)


@pytest.fixture(scope="session")
def two_replicas() -> Iterator[list[Replica]]:
    """Two replicas for tests that leave them as they found them: idle, ready, with nothing but more in their caches."""
    with serving(step_s=0.005) as one, serving(step_s=0.005) as two:
        yield [one, two]


@pytest.fixture(scope="session")
def replica_at_hand() -> Iterator[Replica]:
    """The same for tests that need one, without a pause between its steps."""
    with serving() as found:
        yield found

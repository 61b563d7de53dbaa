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


@pytest.fixture(scope="package")
def replica() -> Iterator[Replica]:
    with serving() as found:
        yield found


@pytest.fixture(scope="package")
def guided_replica() -> Iterator[Replica]:
    with serving(is_guided=True) as found:
        yield found


@pytest.fixture(scope="package")
def other_guided_replica() -> Iterator[Replica]:
    """One that carries on what the first began."""
    with serving(is_guided=True) as found:
        yield found


@pytest.fixture(scope="package")
def slow_replica() -> Iterator[Replica]:
    """Ten milliseconds per token: time to do things to a request while it runs."""
    with serving(step_s=0.01) as found:
        yield found

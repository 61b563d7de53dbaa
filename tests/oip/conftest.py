from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.oip.opened import Ports
    from tests.server.replica import Replica


@pytest.fixture(scope="package")
def replica() -> Iterator[Replica]:
    from tests.server.replica import serving  # with it come the SDKs

    with serving() as found:
        yield found


@pytest.fixture(scope="package")
def slow_replica() -> Iterator[Replica]:
    from tests.server.replica import serving

    with serving(step_s=0.01) as found:
        yield found


@pytest.fixture(scope="package")
def ports(replica: Replica) -> Iterator[Ports]:
    from penstock.http.asgi import AsgiApp
    from tests.oip.opened import opened

    with opened(replica.loop, AsgiApp(replica.app)) as found:
        yield found


@pytest.fixture(scope="package")
def slow_ports(slow_replica: Replica) -> Iterator[Ports]:
    from penstock.http.asgi import AsgiApp
    from tests.oip.opened import opened

    with opened(slow_replica.loop, AsgiApp(slow_replica.app)) as found:
        yield found

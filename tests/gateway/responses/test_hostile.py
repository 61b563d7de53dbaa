"""No request for a response that is kept holds up everybody else's."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator

import pytest

from penstock.tenancy.store import open_store
from tests.gateway.responses.test_service import frozen, keeping
from tests.gateway.running import RunningGateway
from tests.hostile import CORPUS, RESPONSES, Hostile
from tests.loop_pauses import without_pauses
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    path = tmp_path_factory.mktemp("store") / "penstock.db"
    with open_store(f"sqlite:///{path}") as store, keeping(frozen(store), replica_at_hand) as found:
        yield found


@pytest.mark.parametrize("hostile", [one for one in CORPUS if one.path == RESPONSES], ids=str)
@pytest.mark.parametrize("is_background", [False, True])
def test_a_hostile_request_does_not_stop_the_loop(
    gateway: RunningGateway, hostile: Hostile, is_background: bool
) -> None:
    body = hostile.build(NAME)
    if is_background:
        body = body.replace(b"{", b'{"background":true,', 1)

    def attack() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            connection.request("POST", hostile.path, body)
            status = connection.getresponse().status
        eventually(gateway.is_idle)
        return status

    assert without_pauses(gateway.loop, attack) < 500

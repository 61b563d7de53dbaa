"""A replica that a controller keeps without traffic: shown as what it is, followed all the same, used when it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.core.hashing import ROUTING_TOKENS
from penstock.gateway.monitor.fleet_reader import FleetReader
from penstock.gateway.monitor.state import state_of
from penstock.gateway.replicas.replica import Replica
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, serving
from tests.server.replica import Replica as Server
from tests.waiting import eventually

PROMPT = "a long beginning that fills a few routing blocks " * 30


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(routing_tokens=ROUTING_TOKENS, num_blocks=2048) as found:
        yield found


@pytest.fixture
def gateway(server: Server) -> Iterator[RunningGateway]:
    with running_gateway(server) as found:
        yield found


def keep(gateway: RunningGateway, state: str) -> Replica:
    """As the membership does when the store's row has changed."""
    (replica,) = gateway.app.replicas.values()

    def change() -> None:
        replica.keep_in(state, is_draining=bool(state))
        gateway.app.replicas.changed(replica)

    gateway.call(change)
    return replica


def shown(gateway: RunningGateway) -> str:
    app = gateway.app
    return str(
        gateway.call(lambda: state_of(app.replicas.values(), app.pools, app.admission, app.now())).replicas[0].state
    )


def test_the_state_is_shown_and_is_no_fault(gateway: RunningGateway) -> None:
    reader = FleetReader(gateway.app.replicas, gateway.app.admission)
    gateway.call(lambda: gateway.app.replicas.subscribe(reader))
    for state in ("standby", "parked"):
        keep(gateway, state)
        assert shown(gateway) == state
        (reading,) = gateway.call(lambda: reader.read(gateway.app.now())).replicas
        assert (reading.is_usable, reading.is_resting, reading.is_draining) == (False, True, True)
    gateway.call(
        lambda: gateway.app.recorder.look(
            state_of(gateway.app.replicas.values(), gateway.app.pools, gateway.app.admission, 0.0)
        )
    )
    assert 'state="parked"} 1' in gateway.metrics()
    keep(gateway, "")
    assert shown(gateway) == "ready"


def test_a_standby_that_is_gone_is_out_and_one_that_starts_is_starting(gateway: RunningGateway) -> None:
    replica = keep(gateway, "standby")
    gateway.call(replica.lost)
    assert shown(gateway) == "out"
    keep(gateway, "starting")
    gateway.call(replica.lost)
    assert shown(gateway) == "starting"


def test_what_its_cache_holds_is_known_before_it_is_used(server: Server, gateway: RunningGateway) -> None:
    replica = keep(gateway, "standby")
    index = gateway.app.admission.router.index
    before = gateway.call(lambda: index.num_blocks(replica.id))
    server.openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
    eventually(lambda: gateway.call(lambda: index.num_blocks(replica.id)), lambda num: num > before)
    assert gateway.app.admission.replicas(NAME)[0].state == "draining"

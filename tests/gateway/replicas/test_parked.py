"""A gateway with a replica that is parked: nothing goes there, nothing is lost by it, and nobody is alarmed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.api.parking import PARK_PATH, WAKE_PATH
from penstock.gateway.monitor.fleet_reader import FleetReader
from penstock.gateway.monitor.state import ReplicaView, state_of
from penstock.watch.readings import ReplicaReading
from tests.gateway.running import RunningGateway, slow_and_fast
from tests.server.replica import NAME
from tests.waiting import GIVE_UP_S, eventually


def views(gateway: RunningGateway) -> list[ReplicaView]:
    replicas = gateway.app.replicas.values()
    found = gateway.call(lambda: state_of(replicas, gateway.app.pools, gateway.app.admission, gateway.app.now()))
    return list(found.replicas)


def test_streams_of_a_replica_that_is_parked_go_on_elsewhere_and_it_serves_again_when_it_is_woken() -> None:
    with slow_and_fast() as (gateway, slow, fast), ThreadPoolExecutor(1) as pool:
        reader = FleetReader(gateway.app.replicas, gateway.app.admission)
        gateway.call(lambda: gateway.app.replicas.subscribe(reader))

        def reading() -> ReplicaReading:
            first: ReplicaReading = gateway.call(lambda: reader.read(gateway.app.now())).replicas[0]
            return first

        stream = gateway.openai.completions.create(
            model=NAME, prompt="one two", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        assert slow.engine.num_open == 1
        gateway.set_in_use(fast, True)
        parking = pool.submit(slow.call, "POST", PARK_PATH, {"wait_s": 600})
        assert parking.result(GIVE_UP_S)[0] == 200, "the gateway has asked for its stream"
        chunks += stream
        whole = gateway.openai.completions.create(
            model=NAME, prompt="one two", max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        first = eventually(lambda: views(gateway)[0], lambda view: view.state == "parked")
        assert (first.breaker, first.in_flight) == ("closed", 0)
        for _ in range(4):
            gateway.openai.completions.create(model=NAME, prompt="x", max_tokens=1)
        assert slow.engine.measured.cache.cached_blocks == 0
        parked = reading()
        assert (parked.is_resting, parked.is_reachable, parked.is_usable, parked.is_draining) == (
            True,
            True,
            False,
            True,
        )
        status, _, woken = slow.call("POST", WAKE_PATH)
        assert (status, woken["state"]) == (200, "ready")
        back = eventually(lambda: views(gateway)[0], lambda view: view.state == "ready")
        assert back.share == 1.0, "it does not start slowly: it is as warm as it was"
        assert (reading().is_resting, reading().is_usable) == (False, True)
        assert slow.engine.restarts == 0

"""A configuration as a version: a fleet's pool whose engine computes otherwise is added beside the one that serves."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from pathlib import Path

import pytest
from tools.drills.fleet_stand import CHAT, PATIENCE_S, RealFleet, real_fleet
from tools.drills.fleet_stand import POOL as MODEL

from tests.waiting import eventually

pytestmark = pytest.mark.slow


def add_pool(fleet: RealFleet, name: str, **engine: object) -> None:
    """The same as the fleet's first, but for settings of its engine."""
    document = json.loads(fleet.config.read_bytes())
    first = document["pools"][MODEL]
    document["pools"][name] = {**first, "engine": {**first["engine"], **engine}}
    fleet.config.write_text(json.dumps(document))


def ask(fleet: RealFleet, model: str) -> tuple[int, http.client.HTTPMessage]:
    with contextlib.closing(http.client.HTTPConnection(*fleet.gateway, timeout=PATIENCE_S)) as connection:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers


def test_a_pool_with_other_engine_settings_is_a_version_at_once_and_takes_the_traffic_when_told(
    tmp_path: Path, tiny_model: Path
) -> None:
    new = f"{MODEL}@v2"
    with real_fleet(tmp_path, tiny_model, min=1, max=1) as fleet:
        first = fleet.start_controller()
        eventually(lambda: ask(fleet, MODEL)[0], lambda status: status == 200, within_s=PATIENCE_S)
        first.send_signal(signal.SIGTERM)
        first.wait(60)
        add_pool(fleet, new, dtype="bfloat16", speculate="off")
        fleet.start_controller()  # the gateway and the first pool's replica go on

        def pools() -> dict[str, str]:
            return {one.pool: one.id for one in fleet.replicas().values() if one.state == "active"}

        eventually(pools, lambda found: found.keys() == {MODEL, new}, within_s=PATIENCE_S)
        route = eventually(lambda: {one.declared.name: one for one in fleet.store.routes.all()}.get(MODEL))
        assert route is not None
        assert route.weights == {"base": 100.0, "v2": 0.0}

        def answered_by(model: str) -> str:
            return str(ask(fleet, model)[1]["x-penstock-replica"])

        eventually(lambda: ask(fleet, new)[0], lambda status: status == 200)
        base, other = answered_by(f"{MODEL}@base"), answered_by(new)
        assert base != other
        assert answered_by(MODEL) == base
        fleet.run("routes", "weights", MODEL, "base=0", "v2=100")
        eventually(lambda: answered_by(MODEL), lambda found: found == other)
        fleet.store.routes.roll_back(MODEL)
        eventually(lambda: answered_by(MODEL), lambda found: found == base)

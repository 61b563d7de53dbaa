"""`penstock fleet` as an operator runs it: real controllers, a real gateway, replicas of a small random model."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path

import psutil
import pytest
from tools.drills.fleet_stand import CHAT, PATIENCE_S, real_fleet
from tools.drills.fleet_stand import POOL as MODEL

from tests.cli.real_server import write_tiny_model
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def test_service_goes_on_without_its_controller_and_the_next_one_goes_on_from_there(
    tmp_path: Path, tiny_model: Path
) -> None:
    with real_fleet(tmp_path, tiny_model, min=1, max=2) as fleet:
        first = fleet.start_controller()
        (replica,) = eventually(fleet.active, within_s=PATIENCE_S)
        eventually(fleet.chat, lambda status: status == 200)  # the gateway has heard of it
        first.kill()
        first.wait()
        assert fleet.chat() == 200

        fleet.start_controller()
        fleet.start_controller()  # one of the two waits
        process = psutil.Process(fleet.process_of(replica))
        process.kill()
        process.wait()
        (another,) = eventually(fleet.active, lambda found: found and replica not in found, within_s=PATIENCE_S)
        assert another != replica
        eventually(fleet.chat, lambda status: status == 200)
        eventually(fleet.replicas, lambda found: list(found) == [another], within_s=PATIENCE_S)
        assert "start" in fleet.run("fleet", "explain")
        assert another in fleet.run("fleet", "status")
    assert fleet.processes() == []


def test_interrupted_replica_is_replaced_first_and_its_stream_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    with real_fleet(tmp_path, tiny_model, min=1, max=3) as fleet:
        fleet.start_controller()
        (replica,) = eventually(fleet.active, within_s=PATIENCE_S)
        eventually(fleet.chat, lambda status: status == 200)
        options = {"max_tokens": 4000, "min_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
        with contextlib.closing(http.client.HTTPConnection(*fleet.gateway, timeout=PATIENCE_S)) as connection:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **options}
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            begun = answer.readline()
            fleet.run("replicas", "interrupt", replica, "--seconds", "60")
            whole = begun + answer.read()
        assert whole.rstrip().endswith(b"data: [DONE]")
        assert b'"error"' not in whole
        eventually(fleet.replicas, lambda found: replica not in found, within_s=PATIENCE_S)
        assert len(fleet.active()) == 1


def test_a_pool_at_zero_gets_a_replica_for_its_first_request_which_is_told_how_long_it_waits(tmp_path: Path) -> None:
    """Its model comes while the request waits: until then no start can succeed."""
    model = tmp_path / "model"
    with real_fleet(tmp_path, model, min=0, max=1, hold_s=PATIENCE_S) as fleet:
        fleet.start_controller()
        eventually(fleet.models, lambda names: names == [MODEL], within_s=PATIENCE_S)
        assert not fleet.active()
        with contextlib.closing(http.client.HTTPConnection(*fleet.gateway, timeout=PATIENCE_S)) as connection:

            def ask() -> http.client.HTTPResponse:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
                connection.request("POST", CHAT, json.dumps({**body, "max_tokens": 5}))
                answer = connection.getresponse()
                return answer if answer.status == 200 else _read(answer)

            # The gateway may not have heard yet that a controller manages the pool.
            answer = eventually(ask, lambda found: found.status == 200)
            assert answer.readline().startswith(b": waiting for a replica")
            model.mkdir()
            write_tiny_model(model)
            assert answer.read().rstrip().endswith(b"data: [DONE]")
        assert len(fleet.active()) == 1


def _read(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """So that its connection can be used again."""
    answer.read()
    return answer
